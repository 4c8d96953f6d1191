#!/usr/bin/env bash
# Try raytrain with several versions of Ray, each in an environment of its own: `tests/rays.sh FOLDER [VERSION…]`, such
# as `tests/rays.sh /tmp/rays 2.53 2.60`. PYTHON=3.10 chooses the Python. Ends with a line for each version.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
folder=${1:?usage: tests/rays.sh FOLDER [VERSION…]}
shift
[ $# -gt 0 ] || set -- 2.53 2.54 2.55 2.56 2.57 2.58 2.59 2.60

tests=(
  tests/unit/test_private_api.py
  tests/integration/test_training.py::test_a_killed_worker_does_not_change_the_weights
  "tests/faults/test_killed_processes.py::test_a_stop_request_in_any_step_stops_all_workers_after_the_same_step[ray-2]"
  tests/integration/test_demo_command.py::test_the_demo_learns_the_digits
  tests/integration/test_submit_to_a_cluster.py
  tests/integration/test_cluster_page.py
)
failed=0 lines=()
for version in "$@"; do
  environment=$folder/$version-${PYTHON:-default}
  if uv venv --quiet --allow-existing ${PYTHON:+--python "$PYTHON"} "$environment" &&
    uv pip install --quiet --python "$environment" -e . "ray[default,data,train]==$version.*" \
      pytest pytest-timeout pytest-xdist hypothesis 'moto[server]>=5.1,<6'; then
    PATH=$environment/bin:$PATH python -m pytest -m "" -p no:cacheprovider -q "${tests[@]}" |
      tee "$environment/tests.txt" || failed=1
    lines+=("Ray $version: $(tail -n 1 "$environment/tests.txt")")
  else
    lines+=("Ray $version: no environment") failed=1
  fi
done
printf '%s\n' "${lines[@]}"
exit "$failed"
