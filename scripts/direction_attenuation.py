"""How curvature fades from the directions of a cloud that draws together: table and picture.

    python scripts/direction_attenuation.py       four million points at each of five concentrations

On a cylinder of radius 1 the law of the directions is known to first order in the moment ratio eta,
and it differs between geodesic directions (those of the logarithm map) and projected ones (those of
the tangent component): the angle's second and fourth harmonic are read off. On a sphere directions
are uniform at every concentration. Into --out go harmonics.csv, harmonics.md and attenuation.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd
import torch
from attention_terms import markdown
from matplotlib.figure import Figure

from tl_tangent.geometry.curvature import (
    Direction,
    direction_density,
    direction_harmonics,
    predicted_harmonics,
    projected_directions,
)
from tl_tangent.geometry.manifolds import Cylinder, Gaussian, Manifold, Sphere, sample

SCALES = (0.4, 0.2828, 0.2, 0.1414, 0.1)
SURFACES: dict[str, tuple[Manifold, tuple[Direction, ...]]] = {
    "cylinder": (Cylinder(radius=1.0), ("geodesic", "projected")),
    "sphere": (Sphere(dim=2, radius=1.0), ("geodesic", "projected")),
}
COLOURS = {"geodesic": "#0072B2", "projected": "#D55E00"}
ORDERS, BINS = (2, 4), 36


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--points", type=int, default=4_000_000)
    parser.add_argument("--out", type=Path, default=Path("out/attenuation"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = [
        harmonics(name, scale, options.points, seed)
        for name in SURFACES
        for seed, scale in enumerate(SCALES)
    ]
    frame = pd.concat(found, ignore_index=True)
    frame.to_csv(options.out / "harmonics.csv", index=False)
    labels = frame[["surface", "direction"]].agg(" ".join, axis=1)
    labels = labels + ", cos " + frame["order"].astype(str)
    columns = ["eta", "predicted", "measured", "error"]
    text = markdown(frame.set_index(labels.rename("harmonic"))[columns], ".4f")
    (options.out / "harmonics.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    draw(frame, options.points).savefig(options.out / "attenuation.png", dpi=110)


def harmonics(name: str, scale: float, n: int, seed: int) -> pd.DataFrame:
    """Measure one cloud: a row a kind of direction and order of the harmonic."""
    manifold, directions = SURFACES[name]
    law = Gaussian(scale)
    cloud = sample(manifold, law, n, seed=seed)
    rows = []
    for direction in directions:
        u = directions_of(cloud, direction)
        found = direction_harmonics(u)
        told = predicted_harmonics(
            manifold.second_fundamental_form, law.eta(manifold.dim), direction=direction
        )
        for place, order in enumerate(ORDERS):
            rows.append(
                {
                    "surface": name,
                    "direction": direction,
                    "scale": scale,
                    "eta": law.eta(manifold.dim),
                    "order": order,
                    "predicted": float(told.cosine[place]),
                    "measured": float(found.cosine[place]),
                    "error": float(found.error[0, place]),
                }
            )
    return pd.DataFrame(rows)


def directions_of(cloud, direction: Direction) -> torch.Tensor:
    if direction == "geodesic":
        return cloud.u
    return projected_directions(cloud.x, cloud.mu, cloud.tangent)


def draw(frame: pd.DataFrame, n: int) -> Figure:
    """Draw p(u) at one concentration, and the harmonics against eta."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    for ax, name in zip(panels[0], SURFACES, strict=True):
        _densities(ax, name, n)
    for ax, name in zip(panels[1], SURFACES, strict=True):
        _curves(ax, frame[frame["surface"] == name])
    panels[0, 0].set_ylabel("p(u) / uniform")
    panels[1, 0].set_ylabel("harmonic of p(u)")
    return figure


def _densities(ax, name: str, n: int) -> None:
    manifold, directions = SURFACES[name]
    law = Gaussian(SCALES[1])
    cloud = sample(manifold, law, n, seed=99)
    angle = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
    u = torch.stack([angle.cos(), angle.sin()], dim=1)
    for direction in directions:
        seen = directions_of(cloud, direction)
        found = torch.atan2(seen[:, 1], seen[:, 0]).remainder(2 * math.pi).float()
        counts = torch.histc(found, BINS, 0, 2 * math.pi)
        middles = (torch.arange(BINS) + 0.5) * (2 * math.pi / BINS)
        ax.plot(middles, counts / counts.mean(), ".", ms=4, color=COLOURS[direction])
        form, eta = manifold.second_fundamental_form, law.eta(manifold.dim)
        theory = direction_density(form, u, eta, direction=direction) * 2 * math.pi
        ax.plot(angle, theory, color=COLOURS[direction], label=f"{direction}, first order")
    ax.set_title(f"{name}, eta = {law.eta(manifold.dim):.2g}", fontsize=10)
    ax.set_xticks([0, math.pi, 2 * math.pi], ["0", "pi", "2 pi"])
    ax.set_xlabel("angle of u from the curved direction" if name == "cylinder" else "angle of u")
    ax.legend(fontsize=8)


def _curves(ax, frame: pd.DataFrame) -> None:
    styles = {2: ("o", "-"), 4: ("s", "--")}
    for (direction, order), part in frame.groupby(["direction", "order"]):
        marker, line = styles[order]
        colour = COLOURS[direction]
        ax.plot(part["eta"], part["predicted"], line, color=colour, lw=1)
        ax.errorbar(
            part["eta"],
            part["measured"],
            1.96 * part["error"],
            fmt=marker,
            ms=4,
            color=colour,
            label=f"{direction}, cos {order}f",
        )
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xlabel("moment ratio eta (lines: first order)")
    ax.legend(fontsize=8)


if __name__ == "__main__":
    main()
