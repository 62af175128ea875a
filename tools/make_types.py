"""Writes what type checkers see of methods and options, from the codecs' fields.

python tools/make_types.py          writes horovod_compress/known.py and the stubs beside what adds the methods

The functions that make compressions are added to their class when it is imported, so nothing of them is in a source
that a type checker reads.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from horovod_compress.codecs import registry  # noqa: E402
from horovod_compress.options import PRESETS, Options  # noqa: E402

PACKAGE = ROOT / "horovod_compress"
WRITTEN = "Written by tools/make_types.py from the methods' options."
#: By the folder of a front: the option that says which ranks take part, and its type.
FRONTS = {
    "horovod": ("process_set", "Ranks"),
    "torch_dist": ("process_group", "Ranks | None"),
    "fsdp": ("replicate", "Ranks | None"),
}
IMPORTED = {
    "horovod": "from horovod.common.process_sets import ProcessSet as Ranks",
    "torch_dist": "from torch.distributed import ProcessGroup as Ranks",
    "fsdp": "from torch.distributed.device_mesh import DeviceMesh as Ranks",
}


def type_text(kind: Any) -> str:
    """Return a type as it is written."""
    if kind is type(None):
        return "None"
    if typing.get_origin(kind) is Literal:
        return f"Literal[{', '.join(_quoted(value) for value in typing.get_args(kind))}]"
    if typing.get_origin(kind) in (typing.Union, UnionType):
        parts = typing.get_args(kind)
        listed = [value for part in parts if typing.get_origin(part) is Literal for value in typing.get_args(part)]
        values = tuple(dict.fromkeys(value for value in listed if int not in parts or type(value) is not int))
        others = [type_text(part) for part in parts if typing.get_origin(part) is not Literal]
        return " | ".join([*([type_text(Literal[values])] if values else []), *others])
    return str(kind.__name__)


def options_of(kind: type[Any]) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def choices(kind: Any) -> tuple[Any, ...] | None:
    """Return the values that a type allows, None if they cannot be counted."""
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)
    found: list[Any] = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            found += typing.get_args(part)
        elif part is type(None):
            found.append(None)
        elif part is bool:
            found += [True, False]
        else:
            return None
    return tuple(found)


def methods() -> dict[str, type[Any]]:
    """Return the methods by name."""
    return {name: registry.codec_class(name) for name in registry.built_in()}


def known() -> str:
    """Return the module that says what there is, without what it takes to run it."""
    names = "".join(f'    "{name}",\n' for name in [*methods(), *PRESETS])
    own = "".join(f'    "{name}": {{{_choices_text(kind)}}},\n' for name, kind in methods().items())
    return (
        f'"""Names of methods and their options, for type checkers, and for checks that need no torch.\n\n{WRITTEN}\n'
        '"""\n\nfrom __future__ import annotations\n\nfrom typing import Any, Literal\n\n'
        f"MethodName = Literal[\n{names}]\n\n"
        "#: The own options of each method, with the values that they can have where these can be counted.\n"
        f"OPTIONS: dict[str, dict[str, tuple[Any, ...] | None]] = {{\n{own}}}\n"
    )


def _choices_text(kind: type[Any]) -> str:
    return ", ".join(f'"{name}": {_tuple_text(choices(hint))}' for name, hint in options_of(kind).items())


def _tuple_text(values: tuple[Any, ...] | None) -> str:
    return "None" if values is None else f"({', '.join(map(_quoted, values))})"  # there is never only one


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def option_types() -> str:
    """Return the stub of the options: for each method, for any of them, and what ``method()`` takes."""
    head = (
        f"# {WRITTEN}\n\nfrom typing import Literal, TypedDict\n\nfrom typing_extensions import Unpack\n\n"
        "from ..known import MethodName\nfrom ..schedule.plan import Plan\nfrom .base import Codec\n"
    )
    parts = [head, _dictionary("AllMethods", "TypedDict", {name: [hint] for name, hint in options_of(Options).items()})]
    some: dict[str, list[Any]] = {}  # several methods may have an option of one name, with other values
    for name, kind in methods().items():
        own = options_of(kind)
        for option, hint in own.items():
            some.setdefault(option, []).append(hint)
        parts.append(_dictionary(f"For{titled(name)}", "AllMethods", {option: [hint] for option, hint in own.items()}))
    parts.append(_dictionary("OfSomeMethod", "TypedDict", some))
    parts.append("class ForSomeMethod(OfSomeMethod, AllMethods, total=False): ...\n")
    parts.append("def method(name: MethodName, **options: Unpack[OfSomeMethod]) -> Codec: ...\n")
    return "\n".join(parts)


def _dictionary(name: str, base: str, fields: dict[str, list[Any]]) -> str:
    """Return a dictionary; a field takes all of its types."""
    found = {option: type_text(functools.reduce(operator.or_, kinds)) for option, kinds in fields.items()}
    lines = "".join(f"    {option}: {text}\n" for option, text in found.items())
    return f"class {name}({base}, total=False):{f'{chr(10)}{lines}' if lines else ' ...' + chr(10)}"


def titled(name: str) -> str:
    """Return the name of a method as a class has it."""
    return "".join(part.capitalize() for part in name.split("_"))


def factory_types(front: str) -> str:
    """Return the stub of the functions that make a front's compressions."""
    option, kind = FRONTS[front]
    head = (
        f"# {WRITTEN}\n\nfrom collections.abc import Mapping\n\n{IMPORTED[front]}\n"
        "from typing_extensions import Self, Unpack\n\nfrom ...codecs import option_types as of\n"
        "from ...codecs.base import Codec\nfrom ...codecs.masked import Masked\nfrom ...known import MethodName\n"
        "from ..factories import NamedParameters as Named\n\nclass Factories:"
    )
    taken = {name: ("", f"For{titled(name)}") for name in methods()}
    taken |= {name: ("", f"For{titled(preset.method)}") for name, preset in PRESETS.items()}
    taken["create"] = ("method: MethodName | Codec | Masked, ", "ForSomeMethod")
    taken["per_layer"] = ("methods: Mapping[str, MethodName | Codec | Masked], ", "AllMethods")
    lines = [head]
    for name, (first, options) in taken.items():
        rest = f"named_parameters: Named, *, {option}: {kind} = ..., **options: Unpack[of.{options}]) -> Self: ..."
        lines += ["    @classmethod", f"    def {name}(cls, {first}{rest}"]
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """Return what is written, by its path in the package, before it is formatted."""
    fronts = {Path("fronts", front, "factory_types.pyi"): factory_types(front) for front in FRONTS}
    return {Path("known.py"): known(), Path("codecs", "option_types.pyi"): option_types(), **fronts}


def main() -> None:
    """Write them; `make format` puts them into lines."""
    for path, text in files().items():
        (PACKAGE / path).write_text(text)


if __name__ == "__main__":
    main()
