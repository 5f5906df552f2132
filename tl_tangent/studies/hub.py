"""Revisions of a repository on the Hugging Face hub, and the steps that their names tell."""

from __future__ import annotations

import re

from tl_tangent.errors import TangentFileError, TangentValueError

STEP = r"(?:global_)?(?:step|checkpoint)[-_]?(\d+)"


def find_step(name: str, pattern: str = STEP) -> int | None:
    """Return the step that the name of a revision or folder tells, or None.

    Args:
        name: such as "step1000-tokens4B".
        pattern: regular expression whose first group is the step.

    Raises:
        TangentValueError: the pattern is no such expression.
    """
    try:
        found = re.search(pattern, name)
        return None if found is None else int(found[1])
    except (re.error, IndexError, ValueError, TypeError) as error:
        raise TangentValueError(
            f"pattern {pattern!r} gives no step ({error}): write a regular expression whose first "
            "group is a whole number"
        ) from error


def step_of(name: str, pattern: str = STEP) -> int:
    """Return the step that a name tells.

    Raises:
        TangentValueError: it tells none, or as :func:`find_step`.
    """
    step = find_step(name, pattern)
    if step is None:
        raise TangentValueError(
            f"the name {name!r} tells no step by the pattern {pattern!r}: give pattern=, a regular "
            "expression whose first group is the step"
        )
    return step


def revisions_of(repo: str, pattern: str = STEP) -> list[str]:
    """Return the branches and tags of a repository whose names tell a step.

    Raises:
        TangentFileError: they can't be listed, or there are none.
    """
    from huggingface_hub import list_repo_refs
    from huggingface_hub.errors import HfHubHTTPError

    try:
        refs = list_repo_refs(repo)
    except (OSError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TangentFileError(
            f"the revisions of {repo!r} can't be listed ({reason}); give revisions=, such as "
            "['step1000', 'step2000'], that lie in the cache already"
        ) from error
    names = dict.fromkeys(ref.name for ref in [*refs.branches, *refs.tags])
    found = [name for name in names if find_step(name, pattern) is not None]
    if not found:
        raise TangentFileError(
            f"none of the {len(names)} revisions of {repo!r} tells a step by the pattern "
            f"{pattern!r}, first {', '.join([*names][:5])}: give revisions= or pattern="
        )
    return found
