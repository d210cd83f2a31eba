"""The OpenAI SDK, as it is, told of nothing but another base URL: an answer with a tool call and one of text, each whole and
streamed, the list of models, and a refusal."""
import openai

client = openai.OpenAI(base_url="http://broker.local/v1", api_key="sk-none", max_retries=0, timeout=60)
model = "replay/door"
ask = [{"role": "user", "content": "Grüezi"}]
later = ask + [{"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
tools = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]

print([m.id for m in client.models.list()])
for messages in ask, later:
    r = client.chat.completions.create(model=model, messages=messages, tools=tools)
    c = r.choices[0]
    print("whole", [t.function.name for t in c.message.tool_calls or []], c.message.content, c.finish_reason, r.usage.total_tokens)
    with client.chat.completions.stream(model=model, messages=messages, tools=tools, stream_options={"include_usage": True}) as s:
        kinds = [e.type for e in s]
        r = s.get_final_completion()
    c = r.choices[0]
    print("streamed", [t.function.name for t in c.message.tool_calls or []], c.message.content, c.finish_reason, r.usage.total_tokens, kinds.count("chunk") > 2)
try:
    client.chat.completions.create(model="replay/wait", messages=ask)
except openai.PermissionDeniedError as e:
    print(e.status_code, e.code)
