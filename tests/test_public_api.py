"""The public names, written by hand in `poseidon.__all__` and in the tree of `errors.py`, against what is there."""

import inspect
import re

import poseidon
from poseidon import errors


def test_all_names_what_is_there() -> None:
    for name in poseidon.__all__:
        getattr(poseidon, name)  # imported when first used
    present = [name for name, member in vars(poseidon).items() if name[0] != "_" and not inspect.ismodule(member)]
    assert sorted({*getattr(poseidon, "__all__", [])} - {"__version__"}) == sorted(present)


def test_every_public_name_is_documented() -> None:
    undocumented = [name for name in getattr(poseidon, "__all__", []) if not inspect.getdoc(getattr(poseidon, name))]
    assert undocumented == []


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    """Each class stands below its base, indented by four columns more."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for indent, name in re.findall(r"^([│├└─ ]*)(\w+Error)\b", errors.__doc__ or "", flags=re.MULTILINE):
        path[len(indent) // 4 :] = [name]
        drawn[name] = path[-2] if len(path) > 1 else "Exception"
    classes = {name: member for name, member in vars(errors).items() if inspect.isclass(member)}
    assert drawn == {name: member.__base__.__name__ for name, member in classes.items()}
    assert all(member.__doc__ for member in classes.values())
