# The image of all kvscope services (engine, load, forecasts, app): CPU build of torch, no root, no compiler, no weights.
FROM python:3.12-slim AS build
# The CPU build of torch; without this index Linux gets the far larger CUDA build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY observability observability
COPY exporters exporters
COPY dashboards dashboards
COPY alerts alerts
RUN python -m venv /opt/kvscope \
 && /opt/kvscope/bin/pip install --extra-index-url "$TORCH_INDEX" --constraint requirements.lock ".[all]"

FROM python:3.12-slim
RUN groupadd --gid 10001 kvscope && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp kvscope \
 && install -d -o 10001 -g 10001 /run/kvscope /models /data
COPY --from=build /opt/kvscope /opt/kvscope
COPY --chmod=755 deploy/image/entrypoint.sh deploy/image/secrets.sh /usr/local/bin/
# Named volumes take over the owner of these folders: /models keeps weights, /data what is recorded.
ENV PATH=/opt/kvscope/bin:$PATH HOME=/tmp XDG_CACHE_HOME=/models XDG_DATA_HOME=/data PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["entrypoint.sh"]
CMD ["--help"]
