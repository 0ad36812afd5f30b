"""The file of an exported model: what is in it, what it refuses, and where its executables are used."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

import tpu_compile
from tpu_compile.cli import main
from tpu_compile.exporting import archive, programs
from tpu_compile.lowering import portable

GOLDEN = Path(__file__).with_name("golden")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "m.tpuc"
    return tpu_compile.export(model(), (torch.ones(3, 4),), path=path, targets=("cpu",))


def changed(path: Path, to: Path, members: dict[str, bytes] | None = None, **manifest) -> Path:
    """A copy of a file whose manifest or members say something else, with digests that fit."""
    with zipfile.ZipFile(path) as source:
        contents = {name: source.read(name) for name in source.namelist()}
    written = {**json.loads(contents.pop("manifest.json")), **manifest}
    written.pop("members")
    archive.write(to, written, {**contents, **(members or {})})
    return to


def test_the_file_is_a_zip_of_json_stablehlo_and_safetensors(exported):
    with zipfile.ZipFile(exported) as source:
        assert source.testzip() is None
        weights = safetensors.torch.load(source.read("weights.safetensors"))
        manifest = json.loads(source.read("manifest.json"))
        sources = json.loads(source.read("sources.json"))
    assert torch.equal(weights["0.weight"], model()[0].weight)
    assert manifest["format"] == archive.FORMAT and manifest["made_by"]["stablehlo"] == portable.written_version()
    assert [p["families"] for p in manifest["programs"]] == [["cpu", "tpu"]]
    assert any(line[0].endswith("linear.py") for line in sources)


def test_source_lines_may_stay_at_home(tmp_path):
    path = tpu_compile.export(
        model(),
        (torch.ones(3, 4),),
        path=tmp_path / "m.tpuc",
        dynamic_shapes=({0: torch.export.Dim("n")},),
        source_lines=False,
    )
    assert b".py" not in path.read_bytes()
    assert tpu_compile.load(path)(torch.ones(2, 4)).shape == (2, 2)


def test_equal_exports_are_equal_files(exported, tmp_path):
    first, second = (
        tpu_compile.export(model(), (torch.ones(3, 4),), path=tmp_path / name).read_bytes() for name in "ab"
    )
    assert first == second


@pytest.mark.parametrize("place", [0.05, 0.3, 0.6, 0.9])
def test_a_flipped_byte_is_found(exported, tmp_path, place):
    contents = bytearray(exported.read_bytes())
    with zipfile.ZipFile(exported) as source:
        infos = sorted(source.infolist(), key=lambda i: i.header_offset)
        member = infos[int(place * len(infos))]
    contents[member.header_offset + 30 + len(member.filename) + 20 + member.file_size // 2] ^= 0x10
    (tmp_path / "m.tpuc").write_bytes(contents)
    with pytest.raises(tpu_compile.DamagedFile, match="is damaged"):
        tpu_compile.load(tmp_path / "m.tpuc")


@pytest.mark.parametrize("length", [0, 10, 2000, -1])
def test_a_truncated_file_is_refused(exported, tmp_path, length):
    (tmp_path / "m.tpuc").write_bytes(exported.read_bytes()[:length])
    with pytest.raises(tpu_compile.DamagedFile):
        tpu_compile.load(tmp_path / "m.tpuc")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(tpu_compile.DamagedFile, match="cannot be read"):
        tpu_compile.load(tmp_path / "none.tpuc")
    torch.save({}, tmp_path / "m.pt")
    with pytest.raises(tpu_compile.DamagedFile, match="none of tpu_compile"):
        tpu_compile.load(tmp_path / "m.pt")


def test_a_newer_format_and_a_newer_stablehlo_are_refused(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "FORMAT", 2)
    newer = changed(exported, tmp_path / "newer.tpuc", format=2)
    monkeypatch.undo()
    with pytest.raises(tpu_compile.NewerFile, match="Upgrade tpu_compile, or export again"):
        tpu_compile.load(newer)
    later = changed(exported, tmp_path / "later.tpuc", made_by={"stablehlo": "9.1.0"})
    with pytest.raises(tpu_compile.NewerFile, match="Upgrade jaxlib, or export again"):
        tpu_compile.load(later)


@pytest.mark.parametrize(
    "manifest",
    [
        {"programs": []},
        {"programs": [{"families": ["cpu"]}]},
        {"state": [{"names": ["x"], "kind": "buffer", "dtype": "load", "shape": []}]},
        {"arguments": [["state", 99]]},
        {"signature": None},
        {"weights": {"file": "manifest.json", "included": True, "sha256": ""}},
        {"executables": [{"target": "cpu", "family": "cpu", "member": "x", "program": 4, "parts": {}}]},
    ],
    ids=lambda m: next(iter(m)) + str(len(str(m))),
)
def test_a_malformed_manifest_is_a_typed_error(exported, tmp_path, manifest):
    path = changed(exported, tmp_path / "m.tpuc", **manifest)
    with pytest.raises(tpu_compile.ExportError):
        tpu_compile.load(path)(torch.ones(3, 4))


def test_a_program_may_not_call_what_the_host_has(exported, tmp_path):
    text = """func.func public @main(%a: tensor<3x4xf32>) -> tensor<3x2xf32> {
      %0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%a) : (tensor<3x4xf32>) -> tensor<3x2xf32>
      return %0 : tensor<3x2xf32> }"""
    path = changed(exported, tmp_path / "m.tpuc", {"programs/0.vhlo": portable.write(text.encode())})
    with pytest.raises(tpu_compile.DamagedFile, match="xla_ffi_python_cpu_callback"):
        tpu_compile.load(path)
    with pytest.raises(tpu_compile.DamagedFile, match="no handler"):
        programs.load({"ffi_handlers": ["system"]}, "m", portable.write(text.encode()), [])


def test_an_executable_for_this_cpu_is_used_only_when_trusted(exported):
    x = torch.ones(3, 4)
    with tpu_compile.override(cache=False):
        tpu_compile.reset_stats()
        trusted = tpu_compile.load(exported, host_code=True)
        torch.testing.assert_close(trusted(x), model()(x))
        assert list(trusted.origins.values()) == ["file"] and tpu_compile.stats()["xla_compiles"] == 0
        plain = tpu_compile.load(exported)
        assert torch.equal(plain(x), trusted(x))
        assert list(plain.origins.values()) in (["xla"], ["memory"])


def test_an_executable_of_another_machine_is_not_used(exported, tmp_path):
    with zipfile.ZipFile(exported) as source:
        entries = json.loads(source.read("manifest.json"))["executables"]
    entries[0]["parts"]["host_cpu"] = "another"
    path = changed(exported, tmp_path / "m.tpuc", executables=entries)
    loaded, x = tpu_compile.load(path, host_code=True), torch.ones(3, 4)
    torch.testing.assert_close(loaded(x), model()(x))
    assert list(loaded.origins.values()) != ["file"]


def test_an_executable_for_a_tpu_goes_along_and_the_stablehlo_runs_here(tmp_path):
    path = tpu_compile.export(model(), (torch.ones(3, 4),), path=tmp_path / "m.tpuc", targets=("v5e:1x1",))
    loaded, x = tpu_compile.load(path), torch.ones(3, 4)
    (entry,) = loaded.manifest.executables
    assert (entry.target, entry.family, entry.parts["device_kind"]) == ("v5e:1x1", "tpu", "TPU v5 lite")
    torch.testing.assert_close(loaded(x), model()(x))


def test_weights_may_lie_beside_the_file(tmp_path):
    path = tpu_compile.export(model(), (torch.ones(3, 4),), path=tmp_path / "m.tpuc", weights="reference")
    beside, x = tmp_path / "m.tpuc.safetensors", torch.ones(3, 4)
    assert set(safetensors.torch.load_file(beside)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    torch.testing.assert_close(tpu_compile.load(path)(x), model()(x))
    moved = beside.rename(tmp_path / "w.safetensors")
    with pytest.raises(tpu_compile.ExportError, match="weights=PATH"):
        tpu_compile.load(path)
    torch.testing.assert_close(tpu_compile.load(path, weights=moved)(x), model()(x))
    moved.write_bytes(moved.read_bytes()[:-1] + b"\x00")
    with pytest.raises(tpu_compile.DamagedFile, match="does not hold the weights"):
        tpu_compile.load(path, weights=moved)


def test_what_cannot_be_exported_is_said(tmp_path):
    with pytest.raises(tpu_compile.ExportError, match="only str and int are kept"):
        tpu_compile.export(lambda x: {(1, 2): x + 1}, (torch.ones(2),), path=tmp_path / "m.tpuc")
    with pytest.raises(tpu_compile.ExportError, match="cannot be written"):
        tpu_compile.export(torch.sin, (torch.ones(2),), path=tmp_path / "no" / "m.tpuc")
    with pytest.raises(tpu_compile.ExportError, match="say 'include' or 'reference'"):
        tpu_compile.export(torch.sin, (torch.ones(2),), path=tmp_path / "m.tpuc", weights="none")
    assert not list(tmp_path.glob("*"))


def test_a_pt2_file_is_exported(tmp_path):
    program = torch.export.export(model(), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, tmp_path / "m.pt2")
    loaded = tpu_compile.load(tpu_compile.export(tmp_path / "m.pt2", path=tmp_path / "m.tpuc"))
    x = torch.randn(5, 4)
    torch.testing.assert_close(loaded(x), model()(x))


def test_files_of_format_1_are_read(tmp_path):
    """Written when the format was new: a model with state, random numbers and a size that varies."""
    loaded = tpu_compile.load(GOLDEN / "format-1.tpuc")
    expected = json.loads((GOLDEN / "format-1.json").read_text())
    for call in expected:
        result = loaded(torch.tensor(call["x"]), scale=2.0)
        torch.testing.assert_close(result["y"], torch.tensor(call["y"]), rtol=1e-5, atol=1e-6)
        assert int(result["calls"]) == call["calls"] and result["kept"].shape == result["y"].shape


FACTORY = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen.add_(x.shape[0])
        return torch.erf(self.linear(x)).softmax(-1)
def small():
    return Net(), (torch.ones(3, 4),)
"""


def test_the_command_line_exports_and_shows(tmp_path):
    (tmp_path / "models.py").write_text(FACTORY)
    out = tmp_path / "net.tpuc"

    def run(*arguments, status=0):
        done = CliRunner().invoke(main, list(map(str, arguments)))
        assert done.exit_code == status, done.output
        return done.output

    assert str(out) in run("export", f"{tmp_path / 'models.py'}:small", "--out", out, "--dynamic", "x:0=batch:2:64")
    shown = run("inspect", out)
    for words in ("Net", "float32[batch,4]", "linear.weight", "written to", "models.py:10", "2 to 64", "f32[3,2]"):
        assert words in shown, shown
    described = json.loads(run("inspect", out, "--json"))
    assert described["name"] == "Net" and described["programs"][0]["sizes"] == {"batch": 3}
    assert "stablehlo.dot_general" in run("inspect", out, "--stage", "stablehlo")
    assert "HloModule" in run("inspect", out, "--stage", "hlo")
    assert "holds no FX graph" in run("inspect", out, "--stage", "fx", status=2)
    assert "is not of the form" in run(
        "export", f"{tmp_path / 'models.py'}:small", "--out", out, "--dynamic", "x", status=2
    )
    out.write_bytes(out.read_bytes()[:-100])
    assert "is no file of tpu_compile.export" in run("inspect", out, status=1)
