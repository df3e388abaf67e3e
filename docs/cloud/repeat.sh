#!/usr/bin/env bash
# Run a command again as long as it was killed (137) or says that a peer was lost (75):
#   bash docs/cloud/repeat.sh pma train --config dense_1b --workdir gs://my-bucket/runs/dense_1b --distributed
while true; do
    "$@"
    status=$?
    case $status in 75 | 137) ;; *) exit "$status" ;; esac
    echo "status $status: the command runs again" >&2
    sleep "${WAIT_SECONDS:-10}"
done
