"""One model with its engine, for one person: prompts in, outputs as they come."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from caudal.core import Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from caudal.config import EngineConfig
    from caudal.loader import LoadedModel
    from caudal.text.tokenizer import Tokenizer


class Session:
    """Uses a loaded model from one thread. `open_session` makes one."""

    def __init__(self, name: str, model: LoadedModel) -> None:
        self.name = name
        self._model = model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._model.engine.max_model_len

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError for values out of range."""
        from caudal.engine.sampling import validate

        validate(params, self.tokenizer.vocab_size, self.max_model_len)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where its answer begins."""
        return self.tokenizer.encode_chat(self._model.chat_template.render(messages))

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generator[RequestOutput]:
        """The outputs of one request. Closing the generator aborts it.

        Raises InvalidRequestError or RequestTooLongError, and what ended the request if it failed.
        """
        request = Request(uuid.uuid4().hex, tuple(prompt_ids), params)
        outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        self._model.engine.submit(request, outputs.put)
        finished = False
        try:
            while not finished:
                output = outputs.get()
                finished = output.finish_reason is not None
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not finished:
                self._model.engine.abort(request.request_id)


def display_name(model: str) -> str:
    """What a MODEL is called: a file by its name without the ending, others as they are."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else model


def load_model(model: str, config: EngineConfig) -> LoadedModel:
    """Load what MODEL means; a bar shows the progress. Raises what finding, opening and planning it raise."""
    from caudal.cli.support.models import find_model
    from caudal.loader import load

    return load(find_model(model), config)


@contextmanager
def open_session(model: str | None, config: EngineConfig) -> Generator[Session]:
    """Load what MODEL means, by default the default model, and free it afterwards."""
    from caudal.store import default_model

    name = model or default_model()
    loaded = load_model(name, config)
    try:
        yield Session(display_name(name), loaded)
    finally:
        loaded.engine.close()
