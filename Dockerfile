# docker build -t xtts .                                   CPU: to try it, to prepare a corpus, for tests
# docker build -t xtts --build-arg EXTRA=gpu .             GPU: CUDA comes with TensorFlow's wheels; the host needs the driver and the NVIDIA toolkit
# docker run --rm --gpus all -v /data:/data -v "$PWD/runs:/xtts/runs" xtts data.train=/data/persian data.language=fa run=runs/fa
FROM python:3.12-slim
ARG EXTRA=cpu
# ptxas and the CUDA libraries are wheels; what is missing in a slim image is a signal-safe init and OpenMP.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 tini && rm -rf /var/lib/apt/lists/*
WORKDIR /xtts
COPY . .
RUN pip install --no-cache-dir -e ".[${EXTRA}]"
# Written at run time: the run folder (and /xtts/data by the demo, which makes its corpus there). With these mounted
# any user may be given: --user "$(id -u):$(id -g)".
ENV PYTHONUNBUFFERED=1 HOME=/tmp
# The launcher stops its processes by itself; init reaps what they leave. A stop may have to wait for a save.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "python", "launch.py"]
CMD ["--help"]
