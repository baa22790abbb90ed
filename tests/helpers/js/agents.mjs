// Agents of JavaScript SDKs with two tools: node agents.mjs NAME URL plain|stream prints the answer as JSON.
import process from "node:process";

const QUESTION = "What is 2+3+1?";
const SYSTEM = "You add.";
const [name, url, way] = process.argv.slice(2);
const streams = way === "stream";
const openaiUrl = `${url}/v1`;
const tools = {
  add: {
    description: "Add two numbers.",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
      additionalProperties: false,
    },
    run: ({ a, b }) => String(a + b),
  },
  lookup: {
    description: "Look up.",
    parameters: {
      type: "object",
      properties: { query: { type: "string" }, limit: { type: "number" } },
      required: ["query"],
      additionalProperties: false,
    },
    run: () => "café ü",
  },
};
const result = (made, args) => tools[made].run(typeof args === "string" ? JSON.parse(args) : args);

async function openaiChat() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: openaiUrl, apiKey: "x" });
  const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: QUESTION }];
  const functions = Object.entries(tools).map(([name, { description, parameters }]) => ({
    type: "function",
    function: { name, description, parameters },
  }));
  for (;;) {
    const asked = { model: "m", messages, tools: functions };
    const answer = streams
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
    const { message } = answer.choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls)
      messages.push({
        role: "tool",
        tool_call_id: call.id,
        content: result(call.function.name, call.function.arguments),
      });
  }
}

async function openaiResponses() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: openaiUrl, apiKey: "x" });
  const input = [{ role: "user", content: QUESTION }];
  const functions = Object.entries(tools).map(([name, { description, parameters }]) => ({
    type: "function",
    name,
    description,
    parameters,
    strict: false,
  }));
  for (;;) {
    const asked = { model: "m", instructions: SYSTEM, input, tools: functions };
    const answer = streams
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    input.push(...answer.output);
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    for (const call of calls)
      input.push({
        type: "function_call_output",
        call_id: call.call_id,
        output: result(call.name, call.arguments),
      });
  }
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: "x" });
  const messages = [{ role: "user", content: QUESTION }];
  const own = Object.entries(tools).map(([name, { description, parameters }]) => ({
    name,
    description,
    input_schema: parameters,
  }));
  for (;;) {
    const asked = { model: "m", max_tokens: 1000, system: SYSTEM, messages, tools: own };
    const answer = streams
      ? await client.messages.stream(asked).finalMessage()
      : await client.messages.create(asked);
    messages.push({ role: "assistant", content: answer.content });
    const used = answer.content.filter((block) => block.type === "tool_use");
    if (!used.length) return answer.content.at(-1).text;
    messages.push({
      role: "user",
      content: used.map((block) => ({
        type: "tool_result",
        tool_use_id: block.id,
        content: result(block.name, block.input),
      })),
    });
  }
}

async function vercel(kind) {
  const { generateText, streamText, stepCountIs, tool, jsonSchema } = await import("ai");
  let model;
  if (kind === "anthropic") {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    model = createAnthropic({ baseURL: openaiUrl, apiKey: "x" })("m");
  } else if (kind === "compatible") {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    model = createOpenAICompatible({ name: "x", baseURL: openaiUrl, apiKey: "x" })("m");
  } else {
    const { createOpenAI } = await import("@ai-sdk/openai");
    const provider = createOpenAI({ baseURL: openaiUrl, apiKey: "x" });
    model = kind === "chat" ? provider.chat("m") : provider("m");
  }
  const own = Object.fromEntries(
    Object.entries(tools).map(([name, { description, parameters, run }]) => [
      name,
      tool({ description, inputSchema: jsonSchema(parameters), execute: async (args) => run(args) }),
    ]),
  );
  const asked = { model, system: SYSTEM, prompt: QUESTION, tools: own, stopWhen: stepCountIs(5) };
  if (!streams) return (await generateText(asked)).text;
  const running = streamText({
    ...asked,
    onError: ({ error }) => {
      throw error;
    },
  });
  for await (const _ of running.fullStream);
  return await running.text;
}

async function openaiAgents(api) {
  const agents = await import("@openai/agents");
  const { default: OpenAI } = await import("openai");
  agents.setTracingDisabled(true);
  agents.setOpenAIAPI(api);
  agents.setDefaultOpenAIClient(new OpenAI({ baseURL: openaiUrl, apiKey: "x" }));
  const own = Object.entries(tools).map(([name, { description, parameters, run }]) =>
    agents.tool({ name, description, parameters, strict: false, execute: async (args) => run(args) }),
  );
  const agent = new agents.Agent({ name: "A", instructions: SYSTEM, model: "m", tools: own });
  const running = await agents.run(agent, QUESTION, { stream: streams });
  if (streams) {
    for await (const _ of running);
    await running.completed;
  }
  return running.finalOutput;
}

async function langgraph(api) {
  const { createReactAgent } = await import("@langchain/langgraph/prebuilt");
  const { tool } = await import("@langchain/core/tools");
  let model;
  if (api === "anthropic") {
    const { ChatAnthropic } = await import("@langchain/anthropic");
    model = new ChatAnthropic({ model: "m", apiKey: "x", anthropicApiUrl: url, streaming: streams });
  } else {
    const { ChatOpenAI } = await import("@langchain/openai");
    model = new ChatOpenAI({
      model: "m",
      apiKey: "x",
      configuration: { baseURL: openaiUrl },
      streaming: streams,
      useResponsesApi: api === "responses",
    });
  }
  const own = Object.entries(tools).map(([name, { description, parameters, run }]) =>
    tool(async (args) => run(args), { name, description, schema: parameters }),
  );
  const agent = createReactAgent({ llm: model, tools: own, prompt: SYSTEM });
  const state = await agent.invoke({ messages: [{ role: "user", content: QUESTION }] });
  return state.messages.at(-1).text;
}

const agents = {
  "openai chat": openaiChat,
  "openai responses": openaiResponses,
  "anthropic messages": anthropic,
  "ai responses": () => vercel("responses"),
  "ai chat": () => vercel("chat"),
  "ai compatible": () => vercel("compatible"),
  "ai anthropic": () => vercel("anthropic"),
  "openai-agents chat": () => openaiAgents("chat_completions"),
  "openai-agents responses": () => openaiAgents("responses"),
  "langgraph chat": () => langgraph("chat"),
  "langgraph responses": () => langgraph("responses"),
  "langgraph anthropic": () => langgraph("anthropic"),
};
console.log(JSON.stringify(await agents[name]()));
process.exit(0);
