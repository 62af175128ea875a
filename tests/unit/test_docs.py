"""What the documents say is so: links lead somewhere, code runs, options exist, sizes are right."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import check_links
from horovod_compress.cli import command as cli, list as cli_list
from horovod_compress.codecs import registry
from horovod_compress.engine.optimizer import exact_rounds
from horovod_compress.exchange import wire
from horovod_compress.fronts.updates import distributed_update_optimizer as update_optimizer
from horovod_compress.ops import keys
from horovod_compress.options import PRESETS, Options
from tests.support.local import Fleet, spec

ROOT = Path(__file__).resolve().parents[2]
DOCS, CONTRIBUTING = ROOT / "docs", ROOT / "CONTRIBUTING.md"
PAGES = check_links.pages()
OURS = [page for page in PAGES if page.parent != ROOT / "docker"]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


# ---- links ------------------------------------------------------------------------------------


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not list(check_links.problems(page))


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# A heading: twice\n## A heading: twice\n<a id="mine"></a>\n')
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-heading-twice-1) [b](other.md#mine) ![c](https://a.org/b.svg) `[d](none.md)` [e][here] "
        '[f](<other.md> "title")\n\n```\n[g](none.md)\n```\n\n[here]: other.md\n'
    )
    assert not list(check_links.problems(page, tmp_path))
    page.write_text(
        "[a](other.md#a-heading) [b](none.md) [c](../etc) [d](https://nowhere) [e][there]\n"
        '<img src="none.svg">\n\n[f]: none.md\n'
    )
    assert len(list(check_links.problems(page, tmp_path))) == 7


@each_page
def test_every_code_fence_is_closed_and_every_placeholder_filled(page: Path) -> None:
    text = page.read_text()
    assert text.count("\n```") % 2 == 0
    assert not re.search(r"@[A-Z]+_?[A-Z]*@|TODO|FIXME", text)


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^\| \[([\w.-]+)\]\(\1\) \|", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")


def test_the_front_page_is_short() -> None:
    text = "\n".join(
        line
        for line in re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL).split(
            "\n"
        )
        if not line.startswith(("|", "    "))
    )
    assert len(re.findall(r"\w\S*", re.sub(r"\]\([^)]*\)", "]", text))) <= 1000


def words_before(text: str, block: str) -> int:
    """Return how many words a reader passes before the first block that begins like this, tables included."""
    before = re.split(block, text, maxsplit=1, flags=re.MULTILINE)
    assert len(before) == 2
    seen = re.sub(r"!\[[^]]*\]\([^)]*\)|\]\([^)]*\)", "", before[0])  # neither pictures nor the targets of links
    return len(re.findall(r"\w\S*", seen))


def test_a_newcomer_soon_has_a_command_to_try_and_a_script_to_write() -> None:
    front = (ROOT / "README.md").read_text()
    assert words_before(front, r"^(?:    |```bash)") <= 150
    assert words_before(front, r"^```python") <= 350


def test_words_before_a_block_are_counted() -> None:
    assert words_before("# One two\n\n[three four](five.md) ![six](seven.png)\n\n    eight\n", "^    ") == 4


# ---- code -------------------------------------------------------------------------------------


@each_page
def test_python_blocks_compile(page: Path) -> None:
    for number, code in enumerate(blocks(page, "python")):
        compile(code, f"{page.name} block {number}", "exec")


def test_the_diff_in_the_page_on_usage_is_the_diff_of_the_examples() -> None:
    plain, ours = ((ROOT / "examples" / name).read_text().splitlines() for name in ("minimal_plain.py", "minimal.py"))
    lines = [line for line in difflib.ndiff(plain, ours) if line[0] in "+-" and line[2:].strip()]
    assert blocks(DOCS / "usage.md", "diff") == ["".join(f"{line[0]}{line[2:]}\n" for line in lines)]


def code_named(name: str) -> str:
    """Return the block of CONTRIBUTING.md whose first line names a file."""
    return next(code for code in blocks(CONTRIBUTING, "python") if code.startswith(f"# {name}\n"))


@pytest.fixture
def cyclic(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the codec of CONTRIBUTING.md where a file of its own would be."""
    module = ModuleType("horovod_compress.codecs.cyclic")
    module.__package__ = "horovod_compress.codecs"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))
    exec(compile(code_named("horovod_compress/codecs/cyclic.py"), "<CONTRIBUTING.md>", "exec"), module.__dict__)
    return module


def test_the_codec_of_the_walk_through_passes_its_own_test(cyclic: ModuleType) -> None:
    assert "cyclic" in registry.methods() and registry.option_names("cyclic") == ["period"]
    names: dict[str, Any] = {"__name__": "test_cyclic"}
    exec(compile(code_named("tests/unit/test_cyclic.py"), "test_cyclic.py", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


# ---- options and numbers ----------------------------------------------------------------------


def table_after(page: Path, heading: str) -> list[list[str]]:
    """Return the rows of the first table behind a heading, without its head."""
    section = f"\n{page.read_text()}".partition(f"\n{heading}\n")[2]
    assert section, f"{page.name} has no {heading!r}"
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert rows
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows[0].splitlines()[2:]]


def plain(cell: str) -> str:
    return cell.strip("`| ")


def test_the_table_of_options_is_complete_and_its_defaults_are_right() -> None:
    shown = {plain(row[0]): plain(row[1]) for row in table_after(DOCS / "usage.md", "## Options of all methods")}
    assert shown.pop("process_set") == "all ranks"
    assert shown == {
        field.name: f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        for field in dataclasses.fields(Options)
    }


def test_the_table_of_exact_rounds_is_that_of_the_code() -> None:
    def counted(few: bool, steps: int, **options: int) -> int:
        rounds = exact_rounds.chosen(50, few, **options)
        return sum(step in rounds for step in range(steps))

    first, every, begun, counts = zip(*table_after(DOCS / "second_moment.md", "## Which rounds are exact"), strict=True)
    short = f"{counted(True, 100, total_steps=100)} in 100 steps, {counted(True, 300, total_steps=300)} in 300"
    long = str(counted(True, 1000, total_steps=1000))
    assert "levels=3" in first[0] and plain(counts[0]) == str(counted(True, 1000))
    assert "levels=2" in first[2] and plain(counts[2]) == plain(counts[3]) == str(counted(False, 1000))
    assert [plain(count) for count in counts[5:7]] == [short, long]
    assert [plain(number) for number in every[:4]] == ["20", "20", "30", "30"] and "at most 100 later" in begun[0]


HISTORY = (
    r"(?:now|then) the default|older default|(?:earlier|previous) versions?\b|versions before|present version\b|"
    r"quieter machine|fixed\s+since"
)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_reference_pages_tell_no_history(page: Path) -> None:
    assert not re.findall(HISTORY, page.read_text())


def test_the_table_of_methods_is_complete_and_names_their_options() -> None:
    rows = {plain(row[0]): row[5] for row in table_after(DOCS / "methods.md", "## All methods")}
    assert sorted(rows) == sorted(registry.methods())
    for name, cell in rows.items():
        shown = dict(re.findall(r"`(\w+)=([^`]+)`", cell))
        fields = dataclasses.fields(registry.codec_class(name))
        assert shown == {f.name: f'"{f.default}"' if isinstance(f.default, str) else repr(f.default) for f in fields}


def test_the_table_of_methods_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--markdown"]) == 0
    page = (DOCS / "methods.md").read_text()
    begin, end = "<!-- generated: hvd-compress list --markdown -->\n\n", "\n<!-- end of generated -->"
    assert page.partition(begin)[2].partition(end)[0] == capsys.readouterr().out


def test_the_pages_have_every_preset() -> None:
    shown = {}
    for name, stands_for, steps in table_after(DOCS / "methods.md", "## Presets"):
        method, *options = re.findall(r"`([^`]+)`", stands_for)
        both = (dict(o.split("=", 1) for o in every) for every in (options, re.findall(r"`([^`]+)`", steps)))
        shown[plain(name)] = (method, *({o: json.loads(value) for o, value in given.items()} for given in both))
    assert shown == {name: (p.method, dict(p.options), dict(p.updates)) for name, p in PRESETS.items()}
    page = (DOCS / "systems.md").read_text()
    assert all(f"hvc.Compression.{name}(" in page for name in PRESETS)


@pytest.mark.parametrize("page", OURS, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_written_as_code_exist(page: Path) -> None:
    known = {*Options.names(), "process_set", "named_parameters", "compression"}
    known |= {option for name in registry.methods() for option in registry.option_names(name)}
    # Not options of a method: of attach, Horovod, optimizers, load_state_dict, torch, the walk-through and trace.
    known |= {"second_moment", "rebuild_every", "match_norm", "step", *signature(update_optimizer).parameters}
    known |= {"process_group", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view"}
    known |= {
        "static_graph",
        "create_graph",
        "use_reentrant",
        "mixed_precision",
        "skip_all_reduce_unused_params",
        "strategy",
    }
    known |= {"op", "groups", "backward_passes_per_step", "sparse_as_dense", "sparse", "residuals"}
    known |= {"weights_only", "hop", "purpose", "period", "steps", "drop_last", "name", "root_rank"}
    known |= {"every", "labels", "callbacks", "ddp_comm_hook", "comm_hook"}  # of publish(), Lightning and Accelerate
    known |= {"gradient_accumulation_steps", "ddp_find_unused_parameters", "torch_compile"}  # of the Trainer
    known |= {"fused", "lr", "momentum", "nesterov", "eps", "set_to_none"}  # of optimizers
    known |= {
        "replicas",
        "replicate",
        "reshard_after_forward",
        "checkpoint_id",
        "optim_state_dict",
    }  # of fully_shard and its checkpoints
    known |= {"neighbour_copy"}  # of elastic()
    calls = re.findall(r"`(?:[\w.]+\()?(?:[^`]*?, )?([a-z_]+)=[^`=]*`", page.read_text())
    assert not set(calls) - known


def test_the_bits_in_the_page_on_choosing_are_those_of_the_code() -> None:
    for name, payload, *shown in table_after(DOCS / "choosing.md", "## What is sent"):
        method, *options = plain(name).split()
        found = cli_list.entry(registry.codec_class(method), dict(option.split("=") for option in options))
        gathered = found["payloads"] == "GATHER"
        assert payload == f"{found['bits']:.3g}" + "*" * gathered, name
        for ranks, cell in zip((2, 4, 16, 64, 256), shown, strict=True):
            times = ranks - 1 if gathered else 2 * (ranks - 1) / ranks
            bits = 1 + 1 / 32 if (method, ranks) == ("marsit", 2) else found["bits"]  # the page says why
            assert float(plain(cell)) == pytest.approx(times * bits, rel=0.01), (name, ranks)


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## Which method"), ("docs/choosing.md", "# Which method when")]
)
def test_methods_for_few_ranks_are_those_that_are_gathered(page: str, heading: str) -> None:
    rows = {row[0].strip("| "): re.findall(r"`(\w+)`", row[1]) for row in table_after(ROOT / page, heading)}
    for ranks, gathered in (("many ranks", False), ("a very slow link, few ranks", True)):
        found = {name: cli_list.entry(registry.codec_class(name), {})["payloads"] for name in rows[ranks]}
        assert found and all((sent == "GATHER") == gathered for sent in found.values()), found


def test_the_sizes_in_the_page_on_marsit_are_what_is_sent() -> None:
    found = [_marsit_sends(2, 2), _marsit_sends(2, 1), _marsit_sends(3, 1)]
    shown = [row[-1] for row in table_after(DOCS / "marsit.md", "## Bytes")]
    assert [int(re.sub(r"\D", "", cell.rpartition("=")[2])) for cell in shown] == found


def _marsit_sends(levels: int, step: int) -> int:
    """Return the bytes of all four ranks in one step."""
    tensor, sent = spec("weight", 1000, 1000), [0]
    with Fleet(4, [tensor], "marsit", full_precision_every=2, verify_every=0, levels=levels) as fleet:
        for _ in range(step + 1):
            fleet.step([{"weight": torch.ones(1000, 1000)}] * 4)
            sent.append(sum(reducer.metrics.bytes_sent for reducer in fleet.reducers))
    return sent[-1] - sent[-2]


def test_the_sizes_in_the_page_on_global_qsgd_are_what_is_sent() -> None:
    with Fleet(4, [spec("weight", 1000, 1000)], "global_qsgd", verify_every=0) as fleet:
        for _ in range(2):
            before = sum(reducer.metrics.bytes_sent for reducer in fleet.reducers)
            fleet.step([{"weight": torch.ones(1000, 1000)}] * 4)
        sent = sum(reducer.metrics.bytes_sent for reducer in fleet.reducers) - before
    shown = [row[-1] for row in table_after(DOCS / "global_qsgd.md", "## Bytes")]
    assert sum(int(re.sub(r"\D", "", cell.rpartition("=")[2])) for cell in shown) == sent


def test_the_page_on_the_wire_format_is_that_of_the_code() -> None:
    page = (DOCS / "wire-format.md").read_text()
    assert f"Wire version {wire.WIRE_VERSION}." in page
    assert f"A frame is {wire.HEADER_BYTES} bytes of header" in page
    rows = re.findall(r"^\| `([a-z0-9_ ]+)` \| `0x([0-9a-f]{4})` \|$", page, re.MULTILINE)
    names = {*registry.methods(), "full precision", "momentum", "prelude 0"}
    names |= {"verify", "agree", "weights", "norm", "host", "host agrees", "host delivers"}
    assert dict(rows) == {name: f"{wire.codec_id(name):04x}" for name in names}
    purposes = re.findall(r"\b(\d+) [a-z]", page.partition("Purposes: ")[2].partition("\n\n")[0])
    due = {value for name, value in vars(keys).items() if name.isupper() and isinstance(value, int)}
    assert {int(purpose) for purpose in purposes} == due
    fields = [(int(row[0]), int(row[1])) for row in table_after(DOCS / "wire-format.md", "## Frame")]
    ends = [offset + size for offset, size in fields]
    assert [offset for offset, _ in fields] == [0, *ends[:-1]] and ends[-1] == wire.HEADER_BYTES


# ---- messages ---------------------------------------------------------------------------------

#: What stands for anything in a message of the page: names of files, "...", numbers, and N and the like.
ANYTHING = r"\S+\.json|\.\.\.|[\d.:]*\d|\b(?:[A-Z]|NAME|METHOD)\b"
WORDS = re.compile(r"[\w']+")
#: What Python, the system, Gloo and Horovod say.
OTHERS = {
    "'str' object has no attribute 'compress'",
    "terminate called after throwing an instance of 'gloo::IoException'",
    "Too many open files",
    "Tensor type torch.BFloat16Tensor is not supported",
    "Tensor is required to be contiguous",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
}


@pytest.fixture(scope="module")
def said() -> str:
    """Return the words of every string literal but docstrings, each between bars, cut where a text is filled in."""
    texts = (ROOT / "Makefile").read_text().splitlines()
    for path in (*(ROOT / "horovod_compress").rglob("*.py"), *(ROOT / "tools").glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts += [n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str and id(n) not in alone]
    return "".join(f"| {' '.join(WORDS.findall(part))} |" for text in texts for part in re.split(r"%[.\d]*\w", text))


def is_said(words: list[str], said: str, start: str = " ") -> bool:
    """Tell whether literals have these words: all in one, or the end of one, then another from its start."""
    if not words or f"{start}{' '.join(words)} " in said:
        return True
    ends = (n for n in range(len(words) - 1, 0, -1) if f"{start}{' '.join(words[:n])} |" in said)
    return any(is_said(words[n:], said, "| ") for n in ends)


def unknown(messages: Iterable[str], said: str) -> set[str]:
    """Return the messages that have a part that is not said."""
    return {m for m in messages if not all(is_said(WORDS.findall(part), said) for part in re.split(ANYTHING, m))}


def test_the_messages_in_the_page_on_troubleshooting_are_those_of_the_code(said: str) -> None:
    messages = re.findall(r"\*\*`([^`]+)`", (DOCS / "troubleshooting.md").read_text())
    assert len(messages) > 100 and unknown((" ".join(message.split()) for message in messages), said) == OTHERS


def test_a_message_that_the_code_does_not_have_is_found(said: str) -> None:
    made_up = {"this torch was made without Gloo", "rank 1 has gone during hop 2 of bucket 5"}
    assert unknown({*made_up, "this torch was built without Gloo"}, said) == made_up


# ---- citation ---------------------------------------------------------------------------------


def test_the_citation_is_complete() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert all({"type", "title", "authors"} <= set(reference) for reference in citation["references"])
    cited = " ".join(f"{reference.get('url')} {reference.get('notes')}" for reference in citation["references"])
    for number in ("2204.06787", "2103.15195", "104811", "1805.08768", "2305.18627"):
        assert number in cited
