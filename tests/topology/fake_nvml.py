"""A recorded NVML: pynvml's own structures and errors, answers from a table of GPUs."""

import pynvml


class FakeNvml:
    """Stands in for the module pynvml. `gpus`: UUID -> list of (state, status, cluster, clique), one a query."""

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_GPU_FABRIC_STATE_NOT_SUPPORTED = pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    NVML_GPU_FABRIC_STATE_NOT_STARTED = pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED
    NVML_GPU_FABRIC_STATE_IN_PROGRESS = pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
    NVML_GPU_FABRIC_STATE_COMPLETED = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    c_nvmlGpuFabricInfoV_t = pynvml.c_nvmlGpuFabricInfoV_t

    def __init__(self, gpus, init_error=None, query_error=None):
        self.gpus = gpus
        self.init_error = init_error
        self.query_error = query_error
        self.open = 0

    def nvmlInit(self):
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetGpuFabricInfoV(self, handle, reference):
        if self.query_error is not None:
            raise pynvml.NVMLError(self.query_error)
        answers = self.gpus[handle]
        state, status, cluster, clique = answers.pop(0) if len(answers) > 1 else answers[0]
        info = reference._obj
        info.state, info.status, info.cliqueId = state, status, clique
        info.clusterUuid[:] = list(cluster)
