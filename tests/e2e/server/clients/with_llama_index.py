"""LlamaIndex: an answer, a stream, tools, structured output, and embeddings."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


chat, vectors = sys.argv[1:3]
llm = OpenAILike(
    api_base=f"{chat}/v1", api_key="none", model="demo", temperature=0, max_tokens=128,
    is_chat_model=True, is_function_calling_model=True, context_window=2048,
)  # fmt: skip
question = [ChatMessage(role="user", content="What is the capital of France?")]
assert "Paris" in str(llm.chat(question))
assert "Paris" in "".join(part.delta or "" for part in llm.stream_chat(question))
tool = FunctionTool.from_defaults(get_weather)
response = llm.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
(call,) = llm.get_tool_calls_from_response(response)
assert call.tool_name == "get_weather"
embedding = OpenAILikeEmbedding(api_base=f"{vectors}/v1", api_key="none", model_name="embed")
assert len(embedding.get_text_embedding("hello")) == len(embedding.get_query_embedding("bye"))
place = llm.as_structured_llm(Place).chat(
    [ChatMessage(role="user", content="Paris is the capital of France.")]
)
assert isinstance(place.raw, Place)
