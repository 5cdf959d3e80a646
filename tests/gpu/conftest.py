import os

# Virtual ranks share a GPU on separate streams, which the driver must not serialise. Read when CUDA
# starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
