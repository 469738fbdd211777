"""The scripted driver library of tests/gpu, for boards that show GPUs."""

from tests.gpu.conftest import nvml_folder as nvml_folder
