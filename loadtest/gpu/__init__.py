"""What can only be shown on a GPU, in one run: `loadtest/gpu_check.sh`."""
