# fedfm for a server's or a silo's machine: docker build --tag fedfm:0.2.0 .
# CUDA: --build-arg TORCH=https://download.pytorch.org/whl/cu128
FROM python:3.11-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH" torch
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH" ".[flower,accounting]"
# Any user may run it, such as the owner of a kit's folder; what it writes goes into that folder.
ENV HOME=/tmp HF_HUB_OFFLINE=1 FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
WORKDIR /kit
USER 1000:1000
ENTRYPOINT ["fedfm"]
CMD ["--help"]
