#!/bin/sh
# Makes the secrets that the services share, each only if it is missing: secrets.sh FOLDER
set -eu
cd "$1"
for name in kvscope_token grafana_admin_password; do
  if [ -s "$name" ]; then
    echo "$name is kept"
  else
    python -c 'import secrets; print(secrets.token_urlsafe(32), end="")' > "$name.new"
    chmod 444 "$name.new" # the services run as different users; only those that mount the volume see it
    mv "$name.new" "$name"
    echo "$name was made"
  fi
done
