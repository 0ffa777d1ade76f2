"""A client of MCP, as chat programs are: tools of a server that the model calls."""

import asyncio
import json
import sys

import openai
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


async def main() -> None:
    """Let the model call a tool, and answer with its result."""
    client = openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    server = StdioServerParameters(command=sys.executable, args=[sys.argv[3]])
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        tools = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.inputSchema}}
            for tool in (await session.list_tools()).tools
            if tool.name == "get_weather"
        ]
        answer = await client.chat.completions.create(
            model="demo", messages=[QUESTION], tools=tools, tool_choice="required", temperature=0
        )
        call = answer.choices[0].message.tool_calls[0]
        result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
        assert result.content[0].text.startswith("It rains in")
        told = {"role": "tool", "tool_call_id": call.id, "content": result.content[0].text}
        messages = [QUESTION, answer.choices[0].message.model_dump(exclude_none=True), told]
        final = await client.chat.completions.create(model="demo", messages=messages, tools=tools)
        assert final.choices[0].finish_reason in ("stop", "length", "tool_calls")


asyncio.run(main())
