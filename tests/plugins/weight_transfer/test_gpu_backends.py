"""The backends of GPUs against stand-ins for what torch documents: no hardware ran them."""

from __future__ import annotations

import inspect
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions

from modulm import LLM, SamplingParams
from modulm.errors import EngineError, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_weight_transfer import broadcast
from modulm_weights_ipc import IpcWeights
from modulm_weights_ipc.backend import IpcBackend
from modulm_weights_ipc.handles import CudaIpc
from modulm_weights_nccl import WeightBroadcaster

FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 24,
    "cpu_threads": 1, "skip_tokenizer_init": True,
}  # fmt: skip
PROMPT = [{"prompt_token_ids": list(range(5, 30))}]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class OneGpu(CudaIpc):
    """Memory of one GPU that both sides see; handles are numbers of tensors."""

    def __init__(self) -> None:
        self.tensors: dict[bytes, Tensor] = {}

    def device(self) -> int:
        return 0

    def uuid(self, device: int) -> str:
        return "GPU-1"

    def reduce(self, tensor: Tensor) -> Any:  # type: ignore[override]
        handle = len(self.tensors).to_bytes(64, "little")
        self.tensors[handle] = tensor
        size = tensor.untyped_storage().nbytes()
        arguments = (
            Tensor, tensor.shape, tensor.stride(), tensor.storage_offset(),
            torch.storage.TypedStorage, tensor.dtype, 0, handle, size, 0, False, b"counter", 7,
            b"event", True,
        )  # fmt: skip
        inspect.signature(reductions.rebuild_cuda_tensor).bind(*arguments)
        return reductions.rebuild_cuda_tensor, arguments

    def rebuild(self, **arguments: Any) -> Tensor:  # type: ignore[override]
        inspect.signature(reductions.rebuild_cuda_tensor).bind(**arguments)
        assert arguments["ref_counter_handle"] == b"counter"
        assert arguments["event_handle"] == b"event"
        tensor = self.tensors[arguments["storage_handle"]]
        assert tensor.dtype == arguments["dtype"]
        return tensor.as_strided(arguments["tensor_size"], arguments["tensor_stride"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OneGpu:
    one = OneGpu()
    monkeypatch.setattr(IpcBackend, "cuda", one)
    return one


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpu")
    one, other = (make_tiny(folder / str(seed), seed=seed) for seed in (1, 2))
    return one, other


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def expected(model: Path) -> list[int]:
    with LLM(str(model), **FLAGS) as llm:
        return tokens(llm)


def test_handles_of_gpu_memory(models: tuple[Path, Path], gpu: OneGpu) -> None:
    one, other = models
    tensors = load_file(other / "model.safetensors")
    with LLM(str(one), weight_transfer_config={"backend": "ipc"}, **FLAGS) as llm:
        llm.init_weight_transfer_engine()
        weights = IpcWeights(tensors, gpu)
        llm.start_weight_update()
        llm.update_weights(weights.info)
        llm.finish_weight_update()
        assert tokens(llm) == expected(other)
        llm.start_weight_update()
        for change, message in (
            ({"ipc_handles": [{"GPU-2": {}}] * len(tensors)}, "no handle for this GPU, GPU-1"),
            ({"ipc_handles": [{"GPU-1": {}}] * len(tensors)}, "the handle cannot be opened"),
            ({"ipc_handles": []}, "one handle per name"),
            ({"ipc_handles_pickled": "gAN9"}, "pickles are not accepted"),
            ({"dtype_names": ["float31"] * len(tensors)}, "is not a dtype"),
            ({"shapes": [[1]] * len(tensors)}, "the handle is of"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.update_weights({**weights.info, **change})
        assert tokens(llm) == expected(other)
    with pytest.raises(ValueError, match="only GPU memory can be shared"):
        CudaIpc().share(torch.ones(2))


class Group(dist.ProcessGroupGloo):  # type: ignore[name-defined, misc]
    """NCCL's constructor and options around gloo."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(broadcast, "_device", lambda collective: torch.device("cpu"))


def test_broadcasts_between_gpus(models: tuple[Path, Path], nccl: None) -> None:
    one, other = models
    tensors = load_file(other / "model.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer = WeightBroadcaster("127.0.0.1", port, collective="nccl", timeout=300)
    with LLM(str(one), weight_transfer_config={"backend": "nccl"}, **FLAGS) as llm:
        for call, info in (
            (trainer.connect, (llm.init_weight_transfer_engine, trainer.init_info)),
            (lambda: trainer.send(tensors), (llm.update_weights, trainer.info(tensors))),
        ):
            if info[0] == llm.update_weights:
                llm.start_weight_update()
            thread = threading.Thread(target=call)
            thread.start()
            info[0](info[1])
            thread.join()
        llm.finish_weight_update()
        assert tokens(llm) == expected(other)
    trainer.close()


def test_a_build_without_nccl(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with LLM(str(models[0]), weight_transfer_config={"backend": "nccl"}, **FLAGS) as llm:
        info = WeightBroadcaster("127.0.0.1", 1, collective="nccl").init_info
        with pytest.raises(EngineError, match="no NCCL: use the backend gloo"):
            llm.init_weight_transfer_engine(info)
