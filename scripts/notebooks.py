"""The notebooks of demos/: run every source, and write or check its executed form.

    python scripts/notebooks.py            run demos/*.py and write demos/*.ipynb
    python scripts/notebooks.py --check    run them, write nothing, and fail where a cell fails or
                                           an executed form is not that of its source

Sources are scripts with cells, `# %%` and `# %% [markdown]`. Outputs that only a browser with a
script can show are left out of the executed form, which a code host shows without any.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

DEMOS = Path(__file__).parents[1] / "demos"
LEFT_OUT = "An interactive view: run the cell to see it."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="beginnings of names (default: all)")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wanted = tuple(options.names) or ("",)
    for source in sorted(DEMOS.glob("*.py")):
        if not source.name.startswith(wanted):
            continue
        started = time.perf_counter()
        notebook = executed(notebook_of(source))
        print(f"{source.name}: {time.perf_counter() - started:.0f} s", flush=True)
        target = source.with_suffix(".ipynb")
        if options.check:
            if cells_of(notebook_of(source)) != cells_of(nbformat.read(target, as_version=4)):
                print(f"{target.name} is not that of its source: run python scripts/notebooks.py")
                return 1
        else:
            nbformat.write(notebook, target)
    return 0


def notebook_of(source: Path) -> NotebookNode:
    """Read the cells of a script."""
    cells: list[NotebookNode] = []
    for index, part in enumerate(source.read_text(encoding="utf-8").split("# %%")[1:]):
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.splitlines()]
            cell = nbformat.v4.new_markdown_cell("\n".join(lines).strip())
        else:
            cell = nbformat.v4.new_code_cell(body.strip())
        cell["id"] = f"cell-{index}"
        cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def cells_of(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell["cell_type"], cell["source"]) for cell in notebook.cells]


def executed(notebook: NotebookNode) -> NotebookNode:
    """Run all cells in the folder of the project; raises where one fails."""
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(DEMOS.parent)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["outputs"] = [shown(one) for one in cell["outputs"] if kept(one)]
    return notebook


def kept(output: NotebookNode) -> bool:
    """Leave out progress bars and warnings of other packages."""
    return output.get("name") != "stderr"


def shown(output: NotebookNode) -> NotebookNode:
    data = output.get("data", {})
    if "CircuitsVis" in data.get("text/html", ""):
        output["data"] = {"text/plain": LEFT_OUT}
    return output


if __name__ == "__main__":
    sys.exit(main())
