# Sourced by the scripts beside it: finds a Python, makes an environment once, installs the project into it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  printf '%s: %s\n' "${script:-ci}" "$1" >&2
  exit 2
}

# The first interpreter that is 3.11 or newer and can make environments. Names on PATH may be shims that run nothing.
find_python() {
  local name
  for name in ${PYTHON:-} python3.13 python3.12 python3.11 python3 python; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  fail "no Python 3.11 or newer (with venv) was found: install one, or name it with PYTHON=/path/to/python3"
}

# make_environment FOLDER REQUIREMENT…: an environment with the project in it; done again only when what it is made
# from has changed. Editable, so that changed code needs no new install.
make_environment() {
  local folder=$1 python stamp
  shift
  python=$(find_python)
  stamp=$({ cat "$root/pyproject.toml"; printf '%s\n' "$root" "$("$python" -c 'import sys; print(sys.version)')" "$@"; } | cksum)
  if [[ -x $folder/bin/python && -f $folder/stamp && $(<"$folder/stamp") == "$stamp" ]]; then
    return
  fi
  printf '%s: making the environment %s\n' "$script" "$folder" >&2
  rm -rf "$folder"
  if command -v uv >/dev/null 2>&1; then
    uv venv --quiet --seed --python "$python" "$folder"
    uv pip install --quiet --python "$folder/bin/python" "$@"
  else
    # Twice quiet: warnings of a machine's own pip settings say nothing here, errors are still shown.
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"
  fi
  printf '%s\n' "$stamp" >"$folder/stamp"
}
