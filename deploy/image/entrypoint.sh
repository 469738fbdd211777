#!/bin/sh
# Becomes kvscope, after putting secrets from files (KVSCOPE_TOKEN_FILE and so on) into the variables it reads.
set -eu
for name in KVSCOPE_TOKEN KVSCOPE_API_KEY KVSCOPE_ENDPOINT_TOKEN; do
  eval "file=\${${name}_FILE:-}"
  [ -n "$file" ] || continue
  if ! [ -s "$file" ]; then
    echo "error: ${name}_FILE is $file, which is missing or empty." >&2
    echo "next:  let the service 'secrets' make it, or mount a file with the secret there." >&2
    exit 2
  fi
  value=$(cat "$file")
  export "$name=$value"
done
exec kvscope "$@"
