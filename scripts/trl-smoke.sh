#!/usr/bin/env bash
# GRPO with TRL on the CPU: installs TRL and the openai package, builds and starts the server, checks both clients against
# it, and trains an adapter for some tens of steps. Can be told by variables: VENV, the Python environment to use or make;
# STEPS, the number of steps; ROLLOUT, a built command to use instead of building it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-target/trl-venv}
steps=${STEPS:-40}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r examples/trl/requirements.txt
rollout=${ROLLOUT:-${CARGO_TARGET_DIR:-target}/release/rollout}
[ -n "${ROLLOUT:-}" ] || cargo build --quiet --release --bin rollout

work=$(mktemp -d)
"$rollout" serve --device cpu --no-merge-lora --port 0 --allow-root "$work" --max-batch-size 128 --max-seq-length 256 \
  2>"$work/server.log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in $(seq 600); do
  url=$(sed -n 's/.* on \(http:[^,]*\),.*/\1/p' "$work/server.log")
  [ -n "$url" ] && break
  kill -0 "$server" 2>/dev/null || { cat "$work/server.log" >&2; exit 1; }
  sleep 0.1
done
cp -r fixtures/adapters/qv-r8 "$work/"
export TRL_EXPERIMENTAL_SILENCE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$venv/bin/python" examples/trl/check_clients.py --url "$url" --adapter "$work/qv-r8"
"$venv/bin/python" examples/trl/grpo.py --url "$url" --adapters "$work" --steps "$steps"
kill -TERM "$server"
wait "$server"
echo "the server ended with exit code 0"
