#!/usr/bin/env bash
# Runs the tests, examples and benchmarks that need an NVIDIA GPU and prints one summary.
#
#   scripts/gpu-tests.sh [options]
#     --bin DIR          run the test binaries in DIR instead of building with cargo
#     --only-ignored     run only the tests marked as needing a GPU, not those beside them
#     --filter TEXT      run only tests whose name contains TEXT
#     --profile FILE     run them with the page size and kernel options of this profile, which `rollout tune` has written; the
#                        tests of options bring their own and are left out
#     --threads N        tests at once (default: libtest's own)
#     --sanitizer[=TOOL] run them under compute-sanitizer instead: memcheck and racecheck, or the TOOL named. Each test is a
#                        process of its own, several at once, with few of its cases (ROLLOUT_FEW_CASES)
#     --runs FILE        under a sanitizer, only the runs that FILE lists, in its order, to go on where another time ended: a line
#                        each, TOOL BINARY TEST as the summary prints them; a BINARY may lack its hash
#     --jobs N           processes at once under a sanitizer (default: one per processor), dealt over all GPUs
#     --logs DIR         where the output goes (default: target/gpu-tests, or $OUT/gpu-tests)
#     --timeout SECONDS  per binary (default: 900), or per test under a sanitizer (default: 300)
#     --allow-skips      do not fail when a test says that it checked nothing
#
# To build the binaries on a machine without a GPU and collect them:
#   scripts/gpu-tests.sh --collect DIR
#
# Exits with 0 only if there is a GPU, at least one test that needs it ran, all passed and none was skipped; 2 if nothing could be run.
set -uo pipefail
cd "$(dirname "$0")/.."

bin= collect= filter= threads= tools= profile= timeout= runs= allow_skips= mode=--include-ignored skips=()
jobs=$(nproc)
logs=${OUT:+$OUT/gpu-tests}; logs=${logs:-target/gpu-tests}
usage() { sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; }
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=${2:?}; shift ;;
    --collect) collect=${2:?}; shift ;;
    --filter) filter=${2:?}; shift ;;
    --threads) threads=${2:?}; shift ;;
    --runs) runs=$(realpath -e "${2:?}") || exit 2; shift ;;
    --profile) profile=$(realpath -e "${2:?}") || exit 2; shift ;;
    --logs) logs=${2:?}; shift ;;
    --timeout) timeout=${2:?}; shift ;;
    --jobs) jobs=${2:?}; shift ;;
    --sanitizer) tools="memcheck racecheck" ;;
    --sanitizer=*) tools=${1#*=} ;;
    --only-ignored) mode=--ignored ;;
    --allow-skips) allow_skips=1 ;;
    -h|--help) usage; exit 0 ;;
    *) echo "gpu-tests: unknown option $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

[ -n "$tools" ] && timeout=${timeout:-300} || timeout=${timeout:-900}

if [ -n "$profile" ]; then
  export ROLLOUT_KERNEL_OPTIONS=$profile
  skips=(--skip options_take_effect --skip options_that_cannot_work)
fi

# Programs among the examples that compute on a GPU and check what they get.
examples=(custom_mask_gpu graph_per_bucket hot_refresh)

# Paths of the binaries of tests and benchmarks and of the examples that cargo builds, one a line.
build() {
  local output example arguments=()
  output=$(cargo test --release --workspace --lib --tests --bench on_gpu --no-run 2>&1) || {
    printf '%s\n' "$output" >&2
    return 1
  }
  printf '%s\n' "$output" | sed -n 's/^ *Executable.*(\(.*\))$/\1/p'
  for example in "${examples[@]}"; do arguments+=(--example "$example"); done
  cargo build --quiet --release -p examples "${arguments[@]}" >&2 || return 1
  for example in "${examples[@]}"; do echo "${CARGO_TARGET_DIR:-target}/release/examples/$example"; done
}

binaries=()
if [ -n "$bin" ]; then
  for file in "$bin"/*; do [ -f "$file" ] && [ -x "$file" ] && binaries+=("$file"); done
else
  built=$(build) || { echo "gpu-tests: the tests do not build" >&2; exit 2; }
  mapfile -t binaries < <(printf '%s\n' "$built" | sed '/^$/d')
fi
[ ${#binaries[@]} -gt 0 ] || { echo "gpu-tests: no test binaries in ${bin:-the workspace}" >&2; exit 2; }

if [ -n "$collect" ]; then
  mkdir -p "$collect"
  for file in "${binaries[@]}"; do
    # Line numbers of dependencies are not worth the megabytes.
    objcopy --strip-debug "$file" "$collect/$(basename "$file")" 2>/dev/null || cp "$file" "$collect/"
    chmod +x "$collect/$(basename "$file")"
  done
  echo "${#binaries[@]} binaries of tests, examples and benchmarks in $collect"
  exit 0
fi

if ! gpus=$(nvidia-smi -L 2>&1) || [ -z "$gpus" ]; then
  echo "gpu-tests: NOTHING TESTED: no NVIDIA GPU here (nvidia-smi: ${gpus:-not found})" >&2
  exit 2
fi
if [ -n "$tools" ]; then
  sanitizer=$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/cuda/bin" command -v compute-sanitizer) || {
    echo "gpu-tests: NOTHING TESTED: compute-sanitizer is not on the path (it is in the CUDA toolkit and in the PyPI package nvidia-cuda-sanitizer-api)" >&2
    exit 2
  }
fi

# A test that would pass without checking anything for want of a library must fail here.
export ROLLOUT_REQUIRE_NVRTC=1 RUST_BACKTRACE=1
mkdir -p "$logs"
total_passed=0 total_failed=0 total_skipped=0 total_gpu=0 broken=0
summary=

run() { # NAME BINARY
  local name=$1 binary=$2
  local log=$logs/$name.log start=$SECONDS status
  local arguments=("$mode" --show-output "${skips[@]}")
  [ -n "$threads" ] && arguments+=("--test-threads=$threads")
  [ -n "$filter" ] && arguments+=("$filter")
  timeout "$timeout" "$binary" "${arguments[@]}" >"$log" 2>&1
  status=$?
  local passed failed ignored skipped state=ok
  passed=$(sed -n 's/^test result:.* \([0-9]*\) passed.*/\1/p' "$log" | awk '{n+=$1} END {print n+0}')
  failed=$(sed -n 's/^test result:.* \([0-9]*\) failed.*/\1/p' "$log" | awk '{n+=$1} END {print n+0}')
  ignored=$(sed -n 's/^test result:.* \([0-9]*\) ignored.*/\1/p' "$log" | awk '{n+=$1} END {print n+0}')
  skipped=$(grep -cE '^(NOT CHECKED|SKIPPED)' "$log")
  [ "$ignored" -gt 0 ] && skipped=$((skipped + ignored))
  if [ $status -eq 124 ]; then state="TIMED OUT after $timeout s"
  elif [ $status -ne 0 ]; then state="FAILED (exit $status)"
  elif [ "$skipped" -gt 0 ]; then state="SKIPPED $skipped"
  elif ! grep -q '^test result: ok' "$log"; then state="NO RESULT"; status=1
  fi
  [ $status -ne 0 ] && broken=$((broken + 1))
  total_passed=$((total_passed + passed)) total_failed=$((total_failed + failed))
  total_skipped=$((total_skipped + skipped))
  summary+=$(printf '%-44s %6d passed %4d failed %5d s  %s' "$name" "$passed" "$failed" $((SECONDS - start)) "$state")$'\n'
  echo "$name: $state"
  [ $status -ne 0 ] && sed -n 's/^test \(.*\) \.\.\. FAILED$/  failed: \1/p' "$log"
}

# A program passes if it ends well and does not say that it had no GPU.
run_program() { # NAME COMMAND...
  local name=$1 log=$logs/${1// /-}.log start=$SECONDS status state=ok; shift
  timeout "$timeout" "$@" >"$log" 2>&1
  status=$?
  if [ $status -ne 0 ]; then state="FAILED (exit $status)"; broken=$((broken + 1)) total_failed=$((total_failed + 1))
  elif grep -q '^No GPU' "$log"; then state="SKIPPED 1"; total_skipped=$((total_skipped + 1))
  else total_passed=$((total_passed + 1))
  fi
  summary+=$(printf '%-44s %35d s  %s' "$name" $((SECONDS - start)) "$state")$'\n'
  echo "$name: $state"
}

# Tests that measure time, or read what another program gives them: a sanitizer finds nothing new in them.
measuring='breaks_no_capture|refresh_time|shape_of_qwen3_4b|sampling_costs|bandwidth|prefill_rate|score_the_sequences|two_to_the_31|between_decode_steps|decode_rows_cost|32k_tokens|throughput'

# cuBLASLt's kernels hand shared memory over by barriers of a whole cluster, which racecheck takes for races, and reports until the
# machine's memory ends. Under it the plain kernel computes products, and tests of that library alone are left out.
without_library='{"matrix": {"library": false}}'
of_library='^matmul::'

# Kernels whose blocks stay for a whole matrix or step and wait for copies all the while: where racecheck watches every wait they
# take minutes, and gigabytes for what is still to be looked through. Tests of their own have them watched, others leave them out.
# decode_layers is left out there, too: racecheck takes a copy of plain bytes (cp.async.bulk), which brings keys and values, for a
# store of the thread that asks for it, and reports it against every read of the ring that it goes to, whether its bytes are
# expected before or after it. Copies by a tensor map into the same places, ordered by the same barriers, it does not look at.
# Kernels whose blocks form clusters are not left out: racecheck of CUDA 13.0 then fails by itself, with an illegal address.
long_kernels='decode_layers wide_ nf4_layer'
their_tests='gpu_(wide_product|whole_product|four_bit_layer)-'

# One test under one tool, in a process of its own: TOOL BINARY TEST. Prints a line, and what the tool found.
sanitize() {
  local tool=$1 binary=$2 test=$3 status state=ok start=$SECONDS places arguments=()
  local gpu=$((process % gpu_count))
  [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || local -x CUDA_VISIBLE_DEVICES=$gpu
  local kernel log=$logs/$tool-$(basename "$binary")-${test//[^A-Za-z0-9_]/.}.log
  # Calls that fail on purpose are tests of their own.
  if [ "$tool" = racecheck ]; then
    export ROLLOUT_KERNEL_OPTIONS=$without_library
    # A launch is looked through before the next one begins: records of all launches on their way filled the machine's memory.
    arguments+=(--force-blocking-launches)
    if ! [[ $(basename "$binary") =~ $their_tests ]]; then
      for kernel in $long_kernels; do arguments+=(--kernel-name-exclude "kns=$kernel"); done
    fi
  fi
  timeout "$timeout" "$sanitizer" --tool "$tool" --report-api-errors no --show-backtrace no --print-limit 1000 \
    "${arguments[@]}" --error-exitcode 86 "$binary" --include-ignored --exact "$test" --test-threads=1 --nocapture >"$log" 2>&1
  status=$?
  # Every report names the kernels on both sides.
  places=$(grep -oE '(at|access at) [A-Za-z_][A-Za-z0-9_]*\+0x' "$log" | sed 's/.* //; s/+0x//' | sort | uniq -c)
  if [ $status -eq 124 ]; then state="TIMED OUT after $timeout s"
  elif ! grep -q '^test result: ok. 1 passed' "$log"; then state="FAILED (exit $status)"
  elif [ $status -eq 86 ]; then state="$tool FOUND SOMETHING"
  elif [ $status -ne 0 ]; then state="FAILED (exit $status)"
  fi
  printf '%-10s %-96s %4d s  %s\n' "$tool" "$(basename "$binary") $test" $((SECONDS - start)) "$state"
  case $state in
    ok) ;;
    *) [ -n "$places" ] && printf '%s\n' "$places"
       grep -E '^=========|panicked' "$log" | grep -vE 'COMPUTE-SANITIZER|ERROR SUMMARY: 0' | head -20 ;;
  esac
}
export -f sanitize
export logs timeout sanitizer without_library long_kernels their_tests

under_sanitizers() {
  local began=$SECONDS
  local list=$logs/sanitized.txt binary name test tool
  export ROLLOUT_FEW_CASES=1
  : >"$list"
  for binary in "${binaries[@]}"; do
    name=$(basename "$binary")
    case " ${examples[*]} " in *" $name "*) continue ;; esac
    case $name in on_gpu-*) continue ;; esac
    while read -r test; do
      total_gpu=$((total_gpu + 1))
      for tool in $tools; do
        [ "$tool" = racecheck ] && [[ $test =~ $of_library ]] && continue
        printf '%s\n' "$tool $binary $test" >>"$list"
      done
    done < <("$binary" --list --ignored ${filter:+"$filter"} 2>/dev/null | sed -n 's/: test$//p' | grep -vE "$measuring")
  done
  if [ -n "$runs" ]; then
    awk 'function of(tool, path, test) { sub(/.*\//, "", path); sub(/-[0-9a-f]+$/, "", path); return tool " " path " " test }
      NR == FNR { line[of($1, $2, $3)] = line[of($1, $2, $3)] $0 "\n"; next }
      of($1, $2, $3) in line { printf "%s", line[of($1, $2, $3)]; delete line[of($1, $2, $3)]; next }
      NF { print "gpu-tests: no such run: " $0 >"/dev/stderr"; unknown = 1 }
      END { exit unknown }' "$list" "$runs" >"$list.chosen" || exit 2
    mv "$list.chosen" "$list"
  fi
  # Compiled kernels and chosen algorithms are kept, so that the tools need not watch how they come about.
  [ -n "$runs" ] || cut -d' ' -f2 "$list" | sort -u | xargs -r -P "$jobs" -I{} timeout "$timeout" {} --ignored \
    ${filter:+"$filter"} --skip refresh_time --skip shape_of_qwen3_4b --skip two_to_the_31 >/dev/null 2>&1
  [ -n "$runs" ] || echo "$total_gpu GPU tests run once by themselves in $((SECONDS - began)) s"
  gpu_count=$(printf '%s\n' "$gpus" | grep -c '^GPU ')
  export gpu_count
  xargs -r -P "$jobs" --process-slot-var=process -L 1 bash -c 'sanitize "$@"' _ <"$list" | tee "$logs/sanitizers.txt"
  total_passed=$(grep -c ' s  ok$' "$logs/sanitizers.txt")
  broken=$(( $(wc -l <"$list") - total_passed ))
  echo
  echo "Sanitizers on: $(printf '%s' "$gpus" | head -1)"
  echo "$total_gpu GPU tests, $(wc -l <"$list") runs under $tools: $total_passed clean, $broken not, in $((SECONDS - began)) s; logs in $logs"
  [ $total_gpu -gt 0 ] && [ $broken -eq 0 ]
}

if [ -n "$tools" ]; then
  under_sanitizers
  exit
fi

for binary in "${binaries[@]}"; do
  name=$(basename "$binary")
  case " ${examples[*]} " in
    *" $name "*)
      if [ -z "$filter" ]; then run_program "example $name" "$binary"; fi
      continue ;;
  esac
  case $name in
    # Briefly: each asserts what it computes.
    on_gpu-*)
      if [ -z "$filter" ]; then run_program "benchmarks $name" "$binary" --bench --quick --noplot; fi
      continue ;;
  esac
  # Tests marked `ignore` are those that need a GPU; a build without the feature `cuda` has none.
  gpu_tests=$("$binary" --list --ignored ${filter:+"$filter"} 2>/dev/null | grep -c ': test$')
  total_gpu=$((total_gpu + gpu_tests))
  run "$name" "$binary"
done

echo
echo "GPU tests on: $(printf '%s' "$gpus" | head -1)${profile:+, under $profile}"
printf '%s' "$summary"
echo "${#binaries[@]} binaries with $total_gpu GPU tests: $total_passed passed, $total_failed failed, $total_skipped skipped, $broken binaries not clean; logs in $logs"
if [ $broken -ne 0 ] || [ $total_failed -ne 0 ]; then exit 1; fi
if [ $total_gpu -eq 0 ]; then echo "none of the tests needs a GPU: built without the feature cuda?" >&2; exit 1; fi
if [ $total_skipped -ne 0 ] && [ -z "$allow_skips" ]; then echo "tests were skipped" >&2; exit 1; fi
