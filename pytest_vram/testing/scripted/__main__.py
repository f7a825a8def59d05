"""``python -m pytest_vram.testing.scripted --script FILE``: a scripted backend as a server on loopback."""

from __future__ import annotations

import argparse
import sys
import threading

from pytest_vram.errors import VramError
from pytest_vram.testing.scripted.answering import Answerer
from pytest_vram.testing.scripted.script import Script, read_script
from pytest_vram.testing.scripted.serving import serving
from pytest_vram.toolcalls.cases import load


def main() -> int:
    """Serve until standard input ends where that is asked for, or until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m pytest_vram.testing.scripted", description=__doc__)
    parser.add_argument("--script", metavar="FILE", help="what it does, as JSON (default: all is answered right)")
    parser.add_argument("--cases", default="shipped", metavar="PLACE", help="cases that it knows (default: shipped)")
    parser.add_argument("--port", type=int, default=0, help="0: any free one; it is printed")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input ends")
    asked = parser.parse_args()
    try:
        script = read_script(asked.script) if asked.script is not None else Script()
        answerer = Answerer(script, load(asked.cases))
        with serving(answerer, asked.port) as server:
            server.talks = True
            print(f"listening on {server.url}", flush=True)  # noqa: T201
            if asked.with_parent:
                sys.stdin.buffer.read()
            else:
                threading.Event().wait()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"port {asked.port} cannot be listened on: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 2
    except VramError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
