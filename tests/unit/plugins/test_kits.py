"""Every contract kit passes the package that `plugins new` writes, and catches planted bugs.

`PYTHONPATH=tests/support python tests/unit/plugins/test_kits.py` writes the table in docs/plugin-kinds.md.
"""

# ruff: noqa: E501 - one planted bug a line

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from samples import parametrize_sample

import modulm
from modulm.plugins import manager
from modulm.plugins.kinds import kind_names
from modulm.testing import kit
from modulm_command_plugins.template import names_of, rendered, templates

#: Kinds whose packages have a file beside the module, by its suffix.
DATA = {"chat_templates": ".jinja"}
#: Kinds whose kits take seconds: by default only their first planted bug is tried.
SLOW = {"models", "executors", "step_parts", "routes", "worker_functions", "collectives"}

#: Kind -> (text of the new package, what it is replaced by, part of the kit's message).
PLANTED: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "schedulers": (
        ("return max(indices", "return len(running) + 0 * max(indices", "no index of"),
        ("api = 1", "api = 7", "version 7"),
        ("return (request.priority, request.prompt_len)", "return float('nan')", "no number"),
        ("return (request.priority, request.prompt_len)", "return request.id", "no number"),
        ("def key(self, request: Candidate)", "def key(self)", "cannot be called"),
        (
            "return (request.priority, request.prompt_len)",
            "self.n = getattr(self, 'n', 0) + 1; return self.n",
            "different keys",
        ),
        (
            "return (request.priority, request.prompt_len)",
            "request.priority += 1; return request.priority",
            "cannot assign|can't set",
        ),
    ),
    "logits_processors": (
        ("return penalty > 0", "return penalty", "not True or False"),
        ("logits[seen] -= self._penalties[view.row]", "return logits.double()", "float64"),
        ("logits[seen] -= self._penalties[view.row]", "logits[:] = -torch.inf", "no token"),
        ("logits[seen] -= self._penalties[view.row]", "logits[0] = torch.nan", "NaN"),
        ("logits[seen] -= self._penalties[view.row]", "return logits[:-1]", "shape"),
        ("logits[seen] -= self._penalties[view.row]", "view.output.append(1)", "changes the row"),
        (
            "    def release(self, row: int) -> None:\n        self._penalties.pop(row, None)",
            "    def apply(self, views, logits, index):\n        return logits + 1",
            "batch",
        ),
        (
            "logits[seen] -= self._penalties[view.row]",
            "self.n = getattr(self, 'n', 0) + 1; logits[seen] -= self.n",
            "other logits in a batch",
        ),
        ('fields = ("extra_args",)', 'fields = ("extra",)', "does not have: extra"),
    ),
    "grammars": (
        ("if token not in self._next()", "if False", "takes a token that the mask forbids"),
        ("mask[:] = 0", "", "stale bits"),
        ("del self._tokens[len(self._tokens) - tokens :]", "self._tokens.pop()", "rollback"),
        ("return self._next() <=", "return self._next() !=", "finished"),
        ("if self._tokens in self._grammar.choices else set()", "", "is allowed"),
        ("return _Position(self)", "self.m = getattr(self, 'm', None) or _Position(self); return self.m", "share a state|at the start"),
        ('else "only choices are supported"', "else ''", "not a reason or None"),
    ),
    "loaders": (
        ("path.suffix == SUFFIX else None", "True else 'any'", "claims"),
        ('raise CheckpointError(f"{self.path} is truncated', 'print(f"{self.path} is truncated', "truncated"),
        ("for name, entry in header.items()\n        }", "for name, entry in list(header.items())[1:]\n        }", "index"),
        ("tuple(entry[\"shape\"])", "tuple(entry[\"shape\"][::-1])", "shape"),
        ("file.seek(start)", "file.seek(start + 4)", "other numbers|ValueError|RuntimeError"),
        ("yield name, torch.frombuffer(raw, dtype=dtype)", "yield name, torch.frombuffer(raw, dtype=dtype).float()", "index.. bfloat16"),
        ("for name, entry in header.items():\n                raw", "for name, entry in reversed(header.items()):\n                raw", "other numbers|Error"),
    ),
    "tokenizers": (
        ("if (folder / FILE).is_file() else None", "if True else None", "empty folder"),
        ("raise CheckpointError(f\"{path} has no {FILE}\")", "raise KeyError(path)", "not CheckpointError"),
        ("return evolve(tokenizer, chat", "return evolve(tokenizer, stop_ids=(), chat", "stop_ids"),
        ("return evolve(tokenizer, chat", "return evolve(tokenizer, stop_ids=(9999,), chat", "below"),
        ("return evolve(tokenizer", "return tokenizer.encode('x') or evolve(tokenizer", "not a Tokenizer"),
        ("def claims(cls, folder: Path)", "def claims(cls)", "cannot be called"),
    ),
    "speculators": (
        ("[start : start + most]", "[start : start + most + 1]", "were allowed"),
        (".astype(np.int64)", ".astype(np.int32)", "not int64"),
        ("history[start : start + most].astype(np.int64)", "history[start : start + most].tolist()", "not an array"),
        ("for history, most in zip(step.histories, step.most, strict=True)", "for history, most in [*zip(step.histories, step.most, strict=True)][:1]", "arrays of drafts"),
        ("start = int(earlier[-1]) + 1", "start = int(earlier[-1]) + 1; history[0] = 3", "changes the rows"),
        ("return history[start : start + most]", "return np.full(most, -5)", "no tokens"),
        ("start = int(earlier[-1]) + 1", "self.n = getattr(self, 'n', 0) + 1; start = self.n", "in a batch than alone"),
    ),
    "executors": (
        ("def stop(self) -> None:\n        self._thread.shutdown()", "def stop(self) -> None:\n        return", "after stop"),
        ("return self._worker.capacity", "self._worker.capacity", "not a Capacity"),
        ("return self._running().description", "return ModelDescription(tasks=())", "tasks"),
        ("return self._thread.submit(self._running().run, plan)", "return self._thread.submit(self._running().run, plan).result()", "not a Future"),
        ("return self._thread.submit(self._running().run, plan)", "from attrs import evolve\n        return self._thread.submit(lambda: evolve(self._running().run(plan), step=0))", "says step 0"),
        ("return self._thread.submit(self._running().run, plan)", "from attrs import evolve\n        return self._thread.submit(lambda: (r := self._running().run(plan)) and evolve(r, tokens=r.tokens * 0 + 9))", "other tokens"),
    ),
    "kv_connectors": (
        ('f"{rank}of{ranks}"', '"all"', "other bytes"),
        (" / model, ranks", ", ranks", "another model"),
        ("hashlib.sha256(content).digest() != digest", "False", "torn file|divisible|shape"),
        ('self._failed.append((transfer.id, f"x: {error}"))', "self._done.append(transfer.id)", "unknown block"),
        ('self._failed.append((transfer.id, f"x: {error}"))', 'self._failed.append((transfer.id, ""))', "without a reason"),
        ("return next(missing, len(names))", "return len(names) - len(list(missing))", "over a gap"),
        ("for index, content in enumerate(contents)", "for index, content in enumerate(contents[::-1])", "other bytes|another order"),
        ('f"{name.hex()}.kv"', 'f"{os.getpid()}-{name[:1].hex()}.kv"', "unknown|nobody|other bytes|gap"),
        ("yield cache[transfer.blocks[group][index]]", "yield cache[0]", "null block|other bytes"),
        ("self._done, self._failed, self._removed = [], [], []", "", "twice|others fail too"),
    ),
    "step_parts": (
        ("np.minimum(counts, MOST, out=counts)", "counts += 1", "raises a row"),
        ("return _Planner()", "return object()", "planner.. gave"),
        ("return _Runner()", "return 5", "runner.. gave"),
        ("def plan(self, step: StepDraft, left: int) -> object | None:\n        return {\"rows\": len(step.rows)}", "def plan(self, step, left):\n        return {\"rows\": {1, object()}}", "plain"),
        ("np.minimum(counts, MOST, out=counts)", "counts[:] = -1", "negative"),
        ("    name = \"x\"", "    name = ''", "no name"),
    ),
    "adapters": (
        ("out * self.factors[slots].to(out)", "out * self.factors[1].to(out)", "unchanged|slot 0"),
        ("out * self.factors[slots].to(out)", "out", "changes nothing"),
        ("if filled == name:", "if False:", "old values"),
        ("scaled.factors[slot] = ", "scaled.factors[1:] = ", "mixed up"),
        ("raise EngineError(f\"there is no adapter {name!r}\")\n        self._filled", "return\n        self._filled", "EngineError"),
        ("raise CheckpointError(f\"{path}: {error}\") from error", "return", "CheckpointError"),
        ("out if slots is None else", "out + 1 if slots is None else", "unchanged"),
    ),
    "adapter_resolvers": (
        ("return None if folder is None else Path(folder)", "return Path(folder or name)", "not None"),
        ("folder = self._table.get(name)", "folder = self._table.get(name.strip('./~*') and 'poet')", "not None"),
        ("return None if folder is None else Path(folder)", "return folder", "not a path"),
        ("folder = self._table.get(name)", "folder = self._table[name]", "KeyError"),
        ("return cls(table)", "return table", "of.. gave"),
        ("folder = self._table.get(name)", "folder = '/' if name == '..' else self._table.get(name)", "must not become"),
    ),
    "routes": (
        ("body = await read(request, XRequest)", "body = XRequest(text=(await request.json())['text'])", "answers 500"),
        ("return None if self.context.engine.tokenizer is not None else", "return 5 if True else", "absent"),
        ("        return router\n", "        return APIRouter()\n", "no routes"),
        ("body = await read(request, XRequest)", "body = XRequest(text='x')", "no JSON"),
        ("\"/x\",", "\"x\",", "slash|AssertionError|left the family out"),
    ),
    "io_processors": (
        ("raise RequestError(\"data.texts must be a list", "raise ValueError(\"", "not RequestError"),
        ("if not all(isinstance(text, str) and text for text in texts):", "if False:", "pre_process|RequestError"),
        ("return value", "return []", "no prompt"),
        ("return value", "return value[0]", "not a list of prompts"),
        ("(rows @ rows.T).tolist()", "rows @ rows.T", "no JSON"),
        ("(rows @ rows.T).tolist()", "float('nan')", "does not have"),
        ("return list(texts)", "self.seen = getattr(self, 'seen', 0) + 1\n        return [*texts, str(self.seen)]", "depends on other"),
        ("return list(texts)", "texts.append('more')\n        return texts", "data was changed"),
        ("rows = np.stack([output.ravel() for output in outputs])", "outputs[0] *= 2\n        rows = np.stack(outputs)", "changes the model's outputs"),
    ),
    "stat_loggers": (
        ("stats.generated_tokens / stats.seconds", "stats.hit_tokens / stats.queried_tokens", "ZeroDivisionError"),
        ("self._file.flush()", "", "intervals were recorded"),
        ("self._file.flush()", "self._file.flush()\n        print('recorded')", "standard output"),
        ("return cls(Path(path)", "return (Path(path)", "not a X"),
        ("if path is None:\n            return None", "path = path or '/dev/null'", "nobody switched on"),
        ("self._file.close()", "self._file.gone()", "close.. raised"),
        ("self._file.flush()", "self._file.flush()\n        return line", "it returned"),
        ("self._file.write(json.dumps(line) + \"\\n\")", "stats.running and self._file.write(json.dumps(line) + \"\\n\")", "intervals were recorded"),
    ),
    "transcribers": (
        ("if t not in special]", "if True]", "control tokens"),
        ("*prompt,", "", "changes nothing"),
        ("return (\"transcribe\", \"translate\")", "return (\"translate\",)", "without transcribe"),
        ("sound=sound,", "sound=Sound(sound.samples[:10], sound.rate),", "shortens"),
        ("            ],\n            sound", "            9999],\n            sound", "does not have"),
        ("sound=sound,", "sound=sound, params={'temprature': 0},", "no field"),
        ("\"de\": \"german\"", "\"DE\": \"German\"", "lower case"),
    ),
    "speakers": (
        ("if token not in special]", "if True]", "control tokens"),
        ("{voice}: {text}", "{voice}: ", "does not use the text"),
        ("{voice}: {text}", "{voice}: {text}{instructions}", "they are used"),
        ("names = (\"anna\", \"ben\")", "names = (\"anna\", \"anna\")", "listed twice"),
        ("names = (\"anna\", \"ben\")", "names = ()", "no voices"),
        ("{\"temperature\": 0.9}", "{\"temprature\": 0.9}", "no field"),
        ("if token not in special],", "if token not in special] + [9999],", "does not have"),
    ),
    "media_families": (
        ("kinds = (\"image\",)", "kinds = (\"picture\",)", "no kind of media"),
        ("dtype=np.int64)", "dtype=np.int32)", "not int64"),
        ("np.ones(len(tokens), dtype=bool)", "np.zeros(len(tokens), dtype=bool)", "no token gets"),
        ("np.ones(len(tokens), dtype=bool)", "np.ones(3, dtype=bool)", "as long as"),
        ("raise RequestError(f\"no option", "raise KeyError(f\"no option", "not RequestError"),
        ("return \"<image>\"", "return \"\"", "empty"),
        ("{\"patches\": patches.reshape(rows * columns, -1)}", "{\"patches\": np.random.rand(3)}", "two results"),
        ("np.full(rows * columns, token", "np.full(rows * columns, token + 1", "features"),
    ),
    "commands": (
        ("help=\"Whom to greet.\"", "", "no help"),
        ("    \"\"\"Say hello.\"\"\"\n", "", "no help"),
        ("@click.command(\"x\")", "@click.command(\"x\", context_settings={'ignore_unknown_options': True, 'allow_extra_args': True})", "unknown option"),
        ("@click.option(\"--name\"", "@click.option(\"--name\", \"--name\"", "twice"),
        ("@click.command(\"x\")\n@click.option(\"--name\", default=\"world\", help=\"Whom to greet.\")\n", "", "not a click command"),
    ),
    "hooks": (
        ("@hookimpl\ndef modulm_report_header", "def modulm_report_header", "not marked"),
        ("def modulm_report_header(config: Any)", "@hookimpl\ndef modulm_reprt_header()", "no hook"),
        ("def modulm_report_header(config: Any)", "def modulm_report_header(configuration)", "configuration"),
        ("return [\"x is installed\"]", "return [config.model.model]", "AttributeError"),
        ("return [\"x is installed\"]", "return \"x is installed\"", "not a list"),
        ("return [\"x is installed\"]", "return [\"two\\nlines\"]", "line break"),
        ("return [\"x is installed\"]", "return [__import__('uuid').uuid4().hex]", "second time"),
        ("[Check(\"x\", True, \"nothing to complain about\")]", "[Check(\"x\", False)]", "silently"),
    ),
    "platforms": (
        ("Probe(0, ", "Probe(-1, ", "negative"),
        ("attention = (\"sdpa\",)", "attention = \"sdpa\"", "not a tuple"),
        ("(\"float32\", \"bfloat16\")", "(\"float23\",)", "not a torch dtype"),
        ("return torch.device(\"cpu\")", "return \"cpu\"", "device is"),
        ("\"this is still the template: it knows no device\"", "\"\"", "no reason"),
        ("return Probe(0, ", "return Probe(0, __import__('uuid').uuid4().hex + ", "different results"),
        ("def memory(self) -> Memory:", "def choose_dtype(self, stored: str) -> str:\n        return stored + \"_t\"\n\n    def memory(self) -> Memory:", "choose_dtype"),
    ),
    "attention": (
        ("held[plan.slots] = torch", "out.fill_(7.0)\n        return\n        held[plan.slots] = torch", "differ|grouped heads"),
        ("scores = scores * self.spec.scale", "", "grouped heads"),
        ("visible = distance >= 0", "visible = distance >= -1", "grouped heads"),
        ("distance < self.spec.window", "distance <= self.spec.window", "window"),
        ("repeat_interleave(group, 1)", "repeat(1, group, 1)", "grouped heads"),
    ),
    "quantization": (
        ("return out if bias is None else out + bias", "return out", "bias|apply|differ|same"),
        (".to(x.dtype).T\n", ".to(x.dtype).T * 2\n", "."),
        ("return layer.get_buffer(\"rounded\").to(scale.dtype) * scale", "return layer.get_buffer(\"rounded\").to(scale.dtype)", "."),
        ("api = 2", "api = 1", "version 1"),
        ("return None  # no checkpoint", "return ''  # no checkpoint", "."),
    ),
    "models": (
        ("self.mlp_norm.add(self.attn(x, batch), residual)", "self.mlp_norm.add(x, residual)", "."),
        ("return self.mlp(x), residual", "return self.mlp(x) * 1.01, residual", "."),
        ("rope=c.rope(c.layer_type(index))", "rope=None", "."),
        ('"post_attention_layernorm"', '"input_layernorm"', "."),
        ("c.rms_norm_eps)\n        self.attn =", "0.5)\n        self.attn =", "."),
        ("    api = 1\n", "    api = 9\n", "version 9"),
    ),
    "tool_parsers": (
        ("events.append(Content(OPEN + self._block))", "pass", "."),
        ("self._block = None\n\n    def", "pass\n\n    def", "."),
        ("self._cursor.until((wanted,), final=final)", "self._cursor.until((wanted,), final=True)", "."),
        ("ToolArguments(index, body)", "ToolArguments(index, '{}')", "."),
        ("index, self._calls = self._calls, self._calls + 1", "index = 0", "."),
    ),
    "reasoning_parsers": (
        ("self._cursor.take(len(OPEN))", "pass", "."),
        ("self._cursor.until((CLOSE,), final=final)", "self._cursor.until((CLOSE,), final=True)", "."),
        ("starts is None and not final", "False", "."),
        ("events += [Content(text)] if text else []", "pass", "."),
        ("[Reasoning(text)] if text", "[Content(text)] if text", "."),
    ),
    "kernels": (
        ("weight.float() + offset", "weight.float()", "differs from its twin"),
        ("scale, eps)", "scale, 1e-6)", "differs from its twin"),
        ("return result if out is None else out.copy_(result)", "return result", "does not return the tensor"),
        ("result = wide.to(x.dtype)", "result = wide", "not torch.bfloat16"),
        ("    wide = torch", "    x = x - x.mean(0)\n    wide = torch", "differs from its twin|other rows"),
        ("    wide = torch", "    x.mul_(1.5)\n    wide = torch", "differs from its twin"),
        ("return Probe(1, ", "return (1, ", "not a Probe"),
        ("return Probe(1, ", "return Probe(-1, ", "negative"),
        ('else None', 'else False', "not a reason or None"),
        ('{"rms_norm": rms_norm}', '{"rms_norm": rms_norm, "pack_linear": rms_norm}', "share a format"),
    ),
    "ops": (
        ("wide = x.float()", "x.mul_(2.0)\n    wide = x.float()", "writes to argument 0"),
        ("wide = x.float() * weight.float()", "wide = x.float() * weight.float() + torch.rand(1)", "random"),
        ("wide = x.float()", "x = x - x.mean(0)\n    wide = x.float()", "other rows"),
        ("wide = x.float()", "wide = x.view(-1, 32).view(-1).view(-1, 32).float()", "adjacent in memory"),
        (".to(x.dtype)", ".double()", "float64"),
        ('    """limit', '    __doc__ = """limit', "no docstring"),
        ("def x(x: Tensor, weight: Tensor, limit: float = 10.0)", "def x(x, weight, limit=1, **more)", "need names"),
        ("(torch.tanh(wide / limit) * limit)", "(torch.tanh(wide / limit) * (limit if x.dtype is torch.float32 else 9.0))", "than float32"),
    ),
    "collectives": (
        ("first, *others = self._gather(x)", "first, *others = self._gather(x)[:2]", "not the sum"),
        ("first.float() if x.is_floating_point() else first", "first", "rounds after each rank"),
        ("torch.cat(self._gather(x), -1)", "torch.cat(self._gather(x), 0)", "last dimension"),
        ("return self._gather(x)[source]", "return self._gather(x)[0]", "another tensor"),
        ("tensor_split(self.size)[self.rank]", "tensor_split(self.size)[self.size - 1 - self.rank]", "its rows of the sum"),
        ("x.detach().cpu().contiguous()", "x.detach().cpu().t().contiguous() if x.dim() == 2 else x.detach().cpu().contiguous()", "all_reduce"),
        ("for tensor in tensors:\n            self.send(tensor,", "for tensor in tensors[::-1]:\n            self.send(tensor,", "take_over"),
        ("        return total.to(x.dtype)", "        return x.copy_(total)", "changes its input"),
        ("members.rank, members.size, members.name", "members.rank, members.size + 1, members.name", "gave rank"),
        ("return None\n", "return ''\n", "not a reason or None"),
    ),
    "weight_transfer": (
        ("for name, x in self._tensors.items()", "for name, x in list(self._tensors.items())[1:]", "index"),
        ("name, tuple(x.shape)", "name, tuple(x.shape[::-1])", "has shape"),
        ("yield from self._tensors.items()", "yield from reversed(self._tensors.items())", "order"),
        ("yield from self._tensors.items()", "while self._tensors:\n            name = next(iter(self._tensors))\n            yield name, self._tensors.pop(name)", "other tensors"),
        ("except (ValueError, TypeError) as error", "except KeyError as error", "not RequestError"),
        ("end > min(len(data), self.config.most) or end == start", "False", "not RequestError"),
        ('info.get("data") or ""', 'info.pop("data")', "changes update_info"),
        ("flat = torch.frombuffer(data[start:end]", "flat = torch.frombuffer(data[:end - start]", "other numbers"),
    ),
    "poolers": (
        ("cumsum(0)[-1:]", "cumsum(0)[-2:-1]", "another result"),
        ("self._sums.pop(row, None)", "pass", "the next request"),
        ("vector[0].float()", "vector[0].double()", "not float32"),
        ("vector[0].float()", "vector.float()", "gave shape"),
        ("return {row: self._vector(row) for row in rows}", "return {row: self._vector(rows[0]) for row in rows}", "other rows|one result"),
        ("if task not in _TASKS:", "if False:", "not refused"),
        ("for key in settings:", "for key in ():", "not refused"),
        ("return {**_SETTINGS, **given}", "return dict(_SETTINGS)", "drops a setting"),
        ("for layer in self._layers", "for layer in ()", "layers of the checkpoint"),
        ("from collections.abc", "import torch\nfrom collections.abc", "front ends have none"),
        ("if self._tokenizer is None:", "if False:", "without a tokenizer"),
        ('== "pooling"', '!= "x"', "is to generate"),
    ),
    "checkpoints": (
        ('return "HuggingFaceTB/SmolLM2-135M-Instruct"', 'return "https://example.org/model"', "no hub id"),
        ('return "HuggingFaceTB/SmolLM2-135M-Instruct"', 'return Path("weights")', "working directory"),
        ('return "HuggingFaceTB/SmolLM2-135M-Instruct"', 'return Path(__import__("tempfile").mkdtemp())', "config.json"),
        ('return "HuggingFaceTB/SmolLM2-135M-Instruct"', 'return "me/" + __import__("uuid").uuid4().hex', "second time"),
        ('name = "x"', 'name = "me/x"', "a path or a hub id"),
        ("api = 2", "api = 9", "version 9"),
        ('return ("The quick brown fox jumps over the lazy dog.", "Two and two is four.")', 'return "The quick brown fox"', "one text"),
        ('"Two and two is four."', "4", "not a text"),
        ("def source(cls)", "def source(cls, revision)", "cannot be called"),
    ),
    "flags": (
        ("@flag_group\n", "", "not decorated"),
        ('title = "XFlags"', 'title = ""', "no title"),
        ('"Maximum size of what is done."', '""', "no help"),
        ('"What is done."', '"mode"', "no sentence"),
        ("x_limit: int = flag(64", "x_limit: int = flag(0", "below the minimum"),
        ('flag("off"', 'flag("auto"', "not one of"),
        ("x_limit: int", "max_num_seqs: int", "already has max_num_seqs"),
        ('unit="characters"', 'aliases=("model",)', "already has model"),
        ("from modulm.contracts", "import torch\nfrom modulm.contracts", "imports torch"),
    ),
    "worker_functions": (
        ("def x(", "async def x(", "coroutine"),
        ("round(float(parameter.norm()), digits)", "parameter.norm()", "cannot be sent"),
        ('return {"rank": worker.rank, "norms": norms}', "return object()", "cannot be sent"),
        ("def x(worker: WorkerHandle, digits", "def x(*, worker, digits", "first argument"),
        ("    norms = {", "    worker.model.train()\n    norms = {", "changes the worker"),
        ("    norms = {", "    import torch\n    torch.set_default_dtype(torch.float64)\n    norms = {", "changes the worker"),
        ('\n\ndef x(', '\n\ndef made():\n  def x(worker):\n    return 1\n  return x\nx = made()\n\ndef y(', "top of its module"),
        ("worker.model.named_parameters()", "worker.parameters()", "no attribute"),
    ),
    "chat_templates": (
        ('with_name("x.jinja")', 'with_name("y.jinja")', "cannot be read"),
        ("tool_parser=None", 'tool_parser="hermess"', "not installed"),
        ("TEMPLATE = ChatTemplate(", "TEMPLATE = dict(path=", "no ChatTemplate"),
        ("tool_parser=None", "head='{% for x in %}'", "not valid Jinja"),
        ("tool_parser=None", "head='{% set messages = messages[1:] %}'", "is not in the prompt"),
        ("tool_parser=None", "head='{% set messages = messages[::-1] %}'", "order of messages"),
        ("tool_parser=None", "head='{% set tools = none %}'", "tool's name"),
        ("tool_parser=None", "head='{{ add_generation_prompt }}'", "the end of the prompt"),
    ),
}  # fmt: skip


def source_of(kind: str) -> tuple[str, str]:
    """The package's name and its source, for a driver that is called x."""
    names = names_of(kind, "x")
    return names.package, rendered(names)[f"{names.package}/__init__.py"]


@contextmanager
def driver_of(kind: str, source: str) -> Iterator[Any]:
    """Run a package's source and give its driver."""
    names = names_of(kind, "x")
    module = ModuleType(names.package)
    sys.modules[names.package] = module
    registered, dtype = [], torch.get_default_dtype()
    if kind in DATA:
        folder = Path(tempfile.mkdtemp())
        path = f"x{DATA[kind]}"
        (folder / path).write_text(rendered(names)[f"{names.package}/{path}"])
        module.__file__ = str(folder / "__init__.py")
    try:
        exec(compile(source, f"{names.package}.py", "exec"), vars(module))
        if kind in ("adapter_resolvers", "stat_loggers"):
            modulm.register("flags", "x", module.XFlags)
            registered.append(("flags", "x"))
        public = [name for name in module.__all__ if name[0].isupper()]
        classes = [name for name in public if not name.endswith(("Config", "Options", "Flags"))]
        classes = [name for name in classes if not name.endswith("Layer")]
        name = (classes or public or module.__all__)[0]
        yield module if kind == "hooks" else vars(module)[name]
    finally:
        torch.set_default_dtype(dtype)
        del sys.modules[names.package]
        for which in registered:
            modulm.unregister(*which)


@parametrize_sample(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind in SLOW)) for kind in templates()],
    every=3,
)
def test_every_template_passes_its_kit(kind: str) -> None:
    _, source = source_of(kind)
    with driver_of(kind, source) as driver:
        kit.check(kind, driver)


def test_every_template_has_planted_bugs() -> None:
    few = {kind: len(PLANTED.get(kind, ())) for kind in templates()}
    assert not [kind for kind, count in few.items() if count < 5], few


CASES = [
    pytest.param(
        kind,
        number,
        id=f"{kind}-{number}",
        marks=[pytest.mark.exhaustive] * (kind in SLOW and number > 0),
    )
    for kind, bugs in PLANTED.items()
    for number in range(len(bugs))
]


def test_without_assertions_no_kit_passes() -> None:
    program = "from modulm.testing.kit import check; check('routes', object)"
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, check=False
    )
    assert "KitNotRun: Python's option -O leaves out what kits assert" in done.stderr


@parametrize_sample(("kind", "number"), CASES, every=5)
def test_a_planted_bug_is_caught(kind: str, number: int) -> None:
    _, source = source_of(kind)
    old, new, message = PLANTED[kind][number]
    assert old in source, f"the template of {kind} has no {old!r} any more"
    with (
        driver_of(kind, source.replace(old, new)) as driver,
        pytest.raises(Exception, match=message) as caught,
    ):
        kit.check(kind, driver)
    broken = kit.KitNotRun, NameError, SyntaxError
    assert not isinstance(caught.value, broken), caught.value


def test_a_backend_that_no_platform_names_is_tried_all_the_same() -> None:
    """It fills its output with one number and returns."""
    _, source = source_of("attention")
    old, new, _ = PLANTED["attention"][0]
    with driver_of("attention", source.replace(old, new)) as driver:
        named = [p.name for p in manager.current().names("platforms")]
        drivers = [manager.current().load("platforms", name) for name in named]
        assert not any("x" in platform.attention for platform in drivers)
        with pytest.raises(AssertionError):
            kit.check("attention", driver)


def test_a_kit_that_ran_nothing_is_no_pass() -> None:
    source = source_of("attention")[1].replace(
        "if spec.kv_dtype not in",
        "return 'needs a device that is not here'\n        if spec.x not in",
    )
    with driver_of("attention", source) as driver, pytest.raises(kit.KitNotRun, match="not here"):
        kit.check("attention", driver)


def test_new_packages_have_files_to_publish_them(tmp_path: Path) -> None:
    files = rendered(names_of("schedulers", "shortest"))
    assert "id-token: write" in files[".github/workflows/publish.yml"]
    assert "$" not in files["README.md"]
    assert "${{ matrix.python }}" in files[".github/workflows/test.yml"]


PAGE = Path(__file__).resolve().parents[3] / "docs/plugin-kinds.md"
HEAD = "| kind | template | contract kit | planted bugs caught | page |\n|---|---|---|---|---|\n"
#: Kinds that other packages do not write: the section of the page that says why.
OURS = {"isolators": "#isolators"}
#: Kind -> page, for those that are described on the page of another subject.
ELSEWHERE = {
    "kernels": "plugins-kernels.md",
    "ops": "plugins-kernels.md",
    "flags": "write-a-plugin.md#flags-of-your-own",
    "worker_functions": "parallel.md#call-functions-in-workers",
    "chat_templates": "plugins-tokenizer.md#a-chat-template-by-name",
    "adapters": "adapters.md",
    "tool_parsers": "plugins-parser.md",
    "reasoning_parsers": "plugins-parser.md",
    "hooks": "hooks.md",
}


def page_of(kind: str) -> str:
    """The page that describes a kind: an own one, or a part of another."""
    singular = "family" if kind == "media_families" else kind.removesuffix("s")
    stem = "media" if kind == "media_families" else singular.replace("kv_", "").replace("_", "-")
    stem = stem.removeprefix("adapter-")
    own = f"plugins-{stem}.md"
    return own if (PAGE.parent / own).is_file() else ELSEWHERE.get(kind, "drivers.md")


def table_of_kinds() -> str:
    lines = []
    for kind in ("hooks", *kind_names()):
        own = "yes" if kind in templates() else "-"
        tested = kit.kit_of(kind)
        runs = "own" if tested else "class, version, signatures"
        runs = runs if kit.has_kit(kind) else "-"
        page = page_of(kind)
        if kind in OURS:
            lines.append(f"| `{kind}` | - | - | - | [why not]({OURS[kind]}) |\n")
            continue
        lines.append(
            f"| `{kind}` | {own} | {runs} | {len(PLANTED.get(kind, ())) or '-'} | "
            f"[{page.partition('#')[0].removesuffix('.md')}]({page}) |\n"
        )
    return HEAD + "".join(lines)


def test_every_kind_has_all_of_it_or_a_reason() -> None:
    kinds = {"hooks", *kind_names()} - OURS.keys()
    assert kinds == set(templates()) == {kind for kind in kinds if kit.kit_of(kind)}
    assert not [kind for kind in kinds if page_of(kind) == "drivers.md"]
    page = PAGE.read_text(encoding="utf-8").lower()
    assert not [kind for kind, link in OURS.items() if f"\n## {link[1:]}\n" not in page]


def test_the_page_of_new_plugins_names_every_template() -> None:
    page = (PAGE.parent / "write-a-plugin.md").read_text(encoding="utf-8")
    table = page.partition("| | kinds |\n")[2].partition("\n\n")[0]
    assert sorted(re.findall("`([a-z_]+)`", table)) == sorted(templates())


def test_the_table_of_kinds_is_true() -> None:
    assert table_of_kinds() in PAGE.read_text(encoding="utf-8"), "run it (above)"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table_of_kinds()}\n{after}", encoding="utf-8")
