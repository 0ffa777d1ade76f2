"""LangChain's ChatOpenAI: an answer, a stream, tools, structured output."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """A place."""

    city: str
    country: str


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="demo", temperature=0)
question = "What is the capital of France?"
assert "Paris" in model.invoke(question).content
assert "Paris" in "".join(part.content for part in model.stream(question))
bound = model.bind_tools([get_weather], tool_choice="any")
assert bound.invoke("What is the weather in Paris?").tool_calls[0]["name"] == "get_weather"
place = model.with_structured_output(Place).invoke("Paris is the capital of France.")
assert isinstance(place, Place)
