#!/usr/bin/env bash
# What of a Megatron-LM to come fits HDP, read in its source and not run, in ten seconds: imports, seams,
# replaced functions and their parameters, patches of scripts. One table; exit code 0: all that HDP needs
# is there, 1: something is not, 2: no Megatron was given.
#
#   ./scripts/next_megatron.sh CHECKOUT_OR_WHEEL [--all]
#
# Of a version that HDP does not know the parameters are compared with the newest release that it knows.
set -euo pipefail
arguments=()
for one in "$@"; do
    [[ -e $one ]] && one=$(realpath "$one")
    arguments+=("$one")
done
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$PYTHON" -m scripts.dev.next_megatron "${arguments[@]}"
