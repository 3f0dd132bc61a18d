#!/usr/bin/env bash
# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs an inference server with the newest export of the policy, and starts it again whenever it
# ends. {} in the command stands for the folder of the export:
#
#     bash examples/serve_newest.sh /shared/policy vllm serve {} --served-model-name policy
#     bash examples/serve_newest.sh /shared/policy python -m sglang.launch_server --model-path {}
#
# Exports are folders in /shared/policy. One is written as NAME.partial, and renamed once it is
# complete (finish_export of server_weights.py), so folders with this ending are never served.
# To stop, end this script by Ctrl-C or kill: it ends the server first.
set -euo pipefail
exports=${1:?the folder of the exports}
shift
: "${1:?the command of a server}"
server=

newest_export() {
    local folder newest=
    for folder in "$exports"/*/; do
        folder=${folder%/}
        [[ -d $folder && $folder != *.partial ]] || continue
        if [[ -z $newest || $folder -nt $newest ]]; then newest=$folder; fi
    done
    echo "$newest"
}

# Ends a process, then the rest of its group: the workers of a server that was killed live on, and
# keep their memory on the GPU.
end() {
    kill -TERM "$1" 2>/dev/null || true
    wait "$1" || true
    kill -KILL -- "-$1" 2>/dev/null || true
}

stop() {
    local job
    for job in $(jobs -p) $server; do end "$job"; done
    exit "$1"
}

trap 'stop 143' TERM
trap 'stop 130' INT
trap 'stop 129' HUP # of a terminal that is closed
set -m # each job is a process group
while true; do
    folder=$(newest_export)
    if [[ -z $folder ]]; then
        echo "serve_newest: no complete export in $exports yet" >&2
    else
        "${@//'{}'/"$folder"}" &
        server=$!
        echo "serve_newest: process $server serves $folder" >&2
        wait "$server" && status=0 || status=$?
        echo "serve_newest: process $server ended with status $status" >&2
        end "$server"
        server=
    fi
    sleep "${PAUSE_SECONDS:-5}" & wait $!
done
