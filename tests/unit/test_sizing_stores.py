"""Names in the local stores of Hugging Face and Ollama."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pytest_vram.errors import BadModel
from pytest_vram.sizing import estimate, stores
from pytest_vram.testing import recipes
from pytest_vram.testing.sparse import Planned, Value, write_sparse

COMMIT = "a" * 40
DIGEST = "b" * 64


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of Hugging Face, the only one."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of Ollama, the only one."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    (tmp_path / "ollama").mkdir()
    return tmp_path / "ollama"


def repository(hub: Path, name: str, *files: str, revision: str = "main", commit: str = COMMIT) -> Path:
    """A repository as the hub's client lays it out: a reference, and links into the blobs."""
    base = hub / f"models--{name.replace('/', '--')}"
    reference = base / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    snapshot = base / "snapshots" / commit
    (base / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(files):
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (base / "blobs" / str(number)).write_bytes(b"GGUF")
        (snapshot / file).symlink_to(base / "blobs" / str(number))
    return snapshot


def manifest(ollama: Path, name: str, layers: object, *, blobs: tuple[str, ...] = (DIGEST,)) -> Path:
    """A manifest of Ollama and its blobs."""
    file = ollama / "manifests" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(layers if isinstance(layers, str) else json.dumps({"schemaVersion": 2, "layers": layers}))
    (ollama / "blobs").mkdir(exist_ok=True)
    for blob in blobs:
        (ollama / "blobs" / f"sha256-{blob}").write_bytes(b"GGUF")
    return file


def layer(kind: str, digest: str = DIGEST) -> dict[str, object]:
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": 4}


def refusal(model: str) -> str:
    with pytest.raises(BadModel) as caught:
        stores.find(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_or_folder_wins(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that exists is taken, even where a store has the same name."""
    repository(hub, "org/model", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert stores.locate("org/model") == Path("org/model")
    (tmp_path / "m.gguf").touch()
    assert stores.locate(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_a_home_folder_is_expanded(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is the user's folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert stores.locate("~/m.gguf") == tmp_path / "m.gguf"


def test_a_folder_of_safetensors(hub: Path) -> None:
    """A repository with a configuration is its snapshot."""
    snapshot = repository(hub, "org/model", "config.json", "model.safetensors")
    assert stores.locate("org/model") == snapshot
    assert stores.locate(f"org/model@{COMMIT}") == snapshot


def test_a_name_without_an_organisation(hub: Path) -> None:
    """Old repositories have none."""
    snapshot = repository(hub, "gpt2", "config.json", "model.safetensors")
    assert stores.locate("gpt2") == snapshot


def test_another_revision(hub: Path) -> None:
    """A branch, a tag or a pull request by its reference."""
    repository(hub, "org/model", "config.json", "model.safetensors")
    other = repository(hub, "org/model", "config.json", "model.safetensors", revision="refs/pr/1", commit="c" * 40)
    assert stores.locate("org/model@refs/pr/1") == other
    assert "no snapshot 'v9' of org/model" in refusal("org/model@v9")


def test_a_single_snapshot_without_reference(hub: Path) -> None:
    """A download by commit has no ``main``; the only snapshot is meant."""
    snapshot = repository(hub, "org/model", "config.json", "model.safetensors")
    (hub / "models--org--model" / "refs" / "main").unlink()
    assert stores.locate("org/model") == snapshot
    assert "no snapshot 'v9' of org/model" in refusal("org/model@v9")


def test_the_only_gguf_file(hub: Path) -> None:
    """A projector beside it is not the model, but is reported; nor is a later part of a split model."""
    snapshot = repository(
        hub, "org/m-GGUF", "m-Q4-00001-of-00002.gguf", "m-Q4-00002-of-00002.gguf", "mmproj-f16.gguf", "config.json"
    )
    found = stores.find("org/m-GGUF")
    assert found.path == snapshot / "m-Q4-00001-of-00002.gguf"
    assert found.projectors == (snapshot / "mmproj-f16.gguf",)


def test_one_of_several_gguf_files(hub: Path) -> None:
    """Without a choice the files are listed; a word of the name, its stem or all of it chooses."""
    snapshot = repository(hub, "org/m-GGUF", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_K_M.gguf", "Q8_0/m-Q8_0.gguf")
    assert "has several GGUF files: add the one you mean, org/m-GGUF:FILE, of Q8_0/m-Q8_0.gguf" in refusal("org/m-GGUF")
    for choice, file in (
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("m-IQ4_K_M.gguf", "m-IQ4_K_M.gguf"),
        ("m-IQ4_K_M", "m-IQ4_K_M.gguf"),
        ("Q8_0", "Q8_0/m-Q8_0.gguf"),
    ):
        assert stores.locate(f"org/m-GGUF:{choice}") == snapshot / file
    assert "no GGUF file of org/m-GGUF" in refusal("org/m-GGUF:Q4")
    assert "fits several files of org/m-GGUF: " in refusal("org/m-GGUF:m")


def test_a_broken_repository_is_said_to_be(hub: Path) -> None:
    """No snapshot, an empty one, and a reference that leads out of the store."""
    (hub / "models--org--none").mkdir()
    assert "no snapshot 'main' of org/none" in refusal("org/none")
    repository(hub, "org/empty")
    (hub / "models--org--empty" / "snapshots" / COMMIT).mkdir(parents=True)
    assert "holds neither GGUF files nor a config.json" in refusal("org/empty")
    (hub / "models--org--none" / "refs").mkdir()
    (hub / "models--org--none" / "refs" / "main").write_text("../../../etc")
    assert "it should hold the name of a commit, and holds '../../../etc'" in refusal("org/none")
    assert "is not a revision" in refusal("org/none@../../x")


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("registry.ollama.ai/library/llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("me/mine:v1", "registry.ollama.ai/me/mine/v1"),
        ("hf.co/org/m-GGUF:Q4_K_M", "hf.co/org/m-GGUF/Q4_K_M"),
    ],
)
def test_names_of_ollama(ollama: Path, model: str, file: str) -> None:
    """Registry, namespace and tag have Ollama's defaults."""
    manifest(ollama, file, [layer("license", "0" * 64), layer("model")])
    assert stores.locate(model) == ollama / "blobs" / f"sha256-{DIGEST}"


def test_projector_and_adapter_of_ollama_are_reported(ollama: Path) -> None:
    """They cost memory as well."""
    manifest(
        ollama,
        "registry.ollama.ai/library/v/latest",
        [layer("model"), layer("projector", "c" * 64), layer("adapter", "d" * 64)],
        blobs=(DIGEST, "c" * 64, "d" * 64),
    )
    found = stores.find("v")
    assert found.projectors == (ollama / "blobs" / f"sha256-{'c' * 64}",)
    assert found.adapters == (ollama / "blobs" / f"sha256-{'d' * 64}",)
    assert found.origin == "Ollama's v"


def test_projector_and_adapter_of_ollama_are_counted(ollama: Path) -> None:
    """Ollama loads them with the model, so that they are in the figures, and in the command that does the same."""
    digests = (DIGEST, "c" * 64, "d" * 64)
    manifest(
        ollama,
        "registry.ollama.ai/library/v/latest",
        [layer("model"), layer("projector", "c" * 64), layer("adapter", "d" * 64)],
        blobs=digests,
    )
    model, projector, adapter = (ollama / "blobs" / f"sha256-{digest}" for digest in digests)
    recipes.llama(layers=1, tokenizer="none").write(ollama / "m.gguf").replace(model)
    about: dict[str, Value] = {"general.architecture": "clip", "general.type": "mmproj"}
    write_sparse(ollama / "p.gguf", about, [Planned("mm.0.weight", (64, 64), "f16")])[0].replace(projector)
    about = {"general.architecture": "llama", "general.type": "adapter"}
    pair = [Planned(f"output.weight.lora_{letter}", (4, 64), "f32") for letter in "ab"]
    write_sparse(ollama / "a.gguf", about, pair)[0].replace(adapter)
    made = estimate("v", ctx_size=512)
    found = {entry.bucket: entry.bytes for entry in made.entries if entry.bucket in ("projector", "lora")}
    assert found == {"projector": 64 * 64 * 2, "lora": 2 * 4 * 64 * 4}
    assert str(projector) in made.command
    assert str(adapter) in made.command
    assert any("the store keeps a projector" in note.text for note in made.notes)
    assert not any(entry.bucket == "projector" for entry in estimate("v", ctx_size=512, no_mmproj=True).entries)


def test_a_projector_beside_a_model_of_hugging_face_is_told(hub: Path) -> None:
    """llama-server loads it only where it is told to, so that it is not counted, and said."""
    snapshot = repository(hub, "org/sees", "m.gguf", "mmproj-m.gguf")
    recipes.llama(layers=1, tokenizer="none").write(snapshot / "m.gguf")
    made = estimate("org/sees", ctx_size=512)
    assert not any(entry.bucket == "projector" for entry in made.entries)
    assert any("mmproj-m.gguf lies beside the model" in note.text for note in made.notes)


@pytest.mark.parametrize("form", [f"sha256-{DIGEST}", f"sha256:{DIGEST}"])
def test_a_blob_of_ollama_by_its_digest(ollama: Path, form: str) -> None:
    """As Ollama's own logs name it."""
    manifest(ollama, "registry.ollama.ai/library/m/latest", [layer("model")])
    assert stores.locate(form) == ollama / "blobs" / f"sha256-{DIGEST}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is damaged, it is not a manifest"),
        ("{", "is damaged, it is not a manifest"),
        ("[" * 100_000, "is damaged, it is not a manifest"),
        ("[]", "is damaged, it is not a manifest"),
        ('{"layers": 5}', "is damaged, it is not a manifest"),
        ('{"layers": [{"mediaType": 1}]}', "is damaged, it is not a manifest"),
        ('{"layers": []}', "names 0 models instead of one"),
        (json.dumps({"layers": [layer("model"), layer("model")]}), "names 2 models instead of one"),
        (json.dumps({"layers": [layer("tensor; name=a")]}), "as single tensors, not as a GGUF file"),
        (json.dumps({"layers": [layer("model", "e" * 64)]}), r"is missing: run `ollama pull m`"),
        (json.dumps({"layers": [layer("model", "../../../../etc/passwd")]}), "is not the digest of a blob"),
        ('{"layers": [' + " " * (2 << 20), "is damaged, it is not a manifest"),
    ],
)
def test_hostile_manifests_are_refused(ollama: Path, content: str, words: str) -> None:
    """Whatever a manifest says, it ends in one sentence, and nothing outside the store is touched."""
    manifest(ollama, "registry.ollama.ai/library/m/latest", content)
    assert words in refusal("m")


def test_an_unknown_name_says_where_it_looked(ollama: Path, tmp_path: Path) -> None:
    """Both stores, and names that are near."""
    manifest(ollama, "registry.ollama.ai/library/llama3.2/1b", [layer("model")])
    repository(tmp_path / "hub", "org/other", "config.json")
    words = refusal("llama3.2:3b")
    assert str(tmp_path / "hub") in words
    assert str(ollama) in words
    assert "near it are llama3.2:1b" in words
    assert "near it are org/other" in refusal("org/othr")


@pytest.mark.parametrize(
    "model", ["", "  ", "../x", "a/b/c/d/e", "org/../x", "a\0b", "x" * 5000, "org/na me", "~no-such-user/x", "./m"]
)
def test_impossible_names_are_refused(hub: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a name leads out of a store, and no name ends in a traceback."""
    here = tmp_path / "in" / "a" / "folder"  # where `../x` is nothing
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    refusal(model)


def test_a_path_that_is_missing_names_what_is_near(hub: Path, tmp_path: Path) -> None:
    """A misspelt file is not looked for in the stores."""
    (tmp_path / "model-q4.gguf").touch()
    assert refusal(str(tmp_path / "model-q5.gguf")).endswith("model-q5.gguf does not exist; near it are model-q4.gguf")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ],
)
def test_where_hugging_face_keeps_models(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    """The hub client's own variables, in its own order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert stores.hugging_face_folder() == Path(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_store_that_may_not_be_read(hub: Path) -> None:
    """The reason of the system is in the message."""
    repository(hub, "org/model", "config.json")
    (hub / "models--org--model").chmod(0)
    assert "Permission denied" in refusal("org/model")
    (hub / "models--org--model").chmod(0o700)
