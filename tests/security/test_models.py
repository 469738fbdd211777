"""A model folder cannot run code: none of its own, no pickle, no template that leaves its sandbox, no path that leaves the folder."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest

from observability.engine.model.loading import load_model
from observability.errors import KvscopeError, ModelError
from tests.conftest import REPO
from tests.fuzz.targets import small_folder


class Bomb:
    """Pickled, it makes a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.mark), "w"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in small_folder().items():
        (folder / name).write_bytes(content)
    return folder


def change(path: Path, **settings: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_the_folder_is_a_model_as_it_is(folder: Path) -> None:
    assert load_model(folder).config.num_layers == 1


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_folder_that_names_code_of_its_own_is_refused_and_the_code_not_run(folder: Path, file: str) -> None:
    mark = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: pass\n")
    change(folder / file, auto_map={"AutoModelForCausalLM": "evil.Model"}, trust_remote_code=True)
    with pytest.raises(ModelError, match=r"auto_map.*is not run"):
        load_model(folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.safetensors"])
def test_pickled_weights_are_refused_and_not_loaded(folder: Path, name: str) -> None:
    mark = folder / "ran"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ModelError):
        load_model(folder)
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes()).close()  # noqa: S301  that it would have worked
    assert mark.exists()


def test_an_index_that_points_outside_reads_nothing_there(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    index = {"weight_map": {"model.embed_tokens.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"outside\.safetensors is listed in .* and missing"):
        load_model(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_does_not_leave_its_sandbox(folder: Path, template: str) -> None:
    change(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(KvscopeError):
        load_model(folder).tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_no_module_unpickles_or_runs_what_it_reads() -> None:
    """Beside ruff's S301, S307 and S602: calls by any name that load pickles, run text as code or start a shell."""
    calls = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "os.system", "os.popen", "yaml.unsafe_load", "marshal.loads"}  # fmt: skip
    found = []
    for part in ("observability", "exporters", "dashboards", "alerts"):
        for path in sorted((REPO / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords)
                    unpickles = any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
                    if name in calls or shell or unpickles:
                        found.append(f"{path.relative_to(REPO)}:{node.lineno} {name}")
    assert found == []
