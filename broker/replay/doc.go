// Package replay is a model provider that plays a conversation from a file. The tool calls in the file are really made by
// whoever asks, and the answers are filled in from their real results, so a replay shows what the machine does without
// any model.
//
// # Conversation files
//
// A conversation is a YAML (or JSON) file named <name>.yaml, .yml or .json; its model id is replay/<name>. It is a list of
// steps, each what the model answers to one request:
//
//	version: 1
//	description: Says who it is.
//	steps:
//	  - text: I look.                     # optional beside tool calls
//	    tool_calls:
//	      - id: identity                  # unique in the file
//	        name: shell
//	        arguments: {command: "whoami"}
//	    usage: {input_tokens: 100, cached_input_tokens: 0, output_tokens: 12}
//	  - text: "I am {{ trim (result \"identity\").Output }}."
//	    usage: {input_tokens: 120, output_tokens: 6}
//
// The player keeps nothing between requests: the step is chosen by the number of assistant messages in the request. A
// request behind the last step is refused. Usage is what the step is billed as; it does not depend on the request.
//
// Text is a text/template over the tool results in the request. Beside the built-in functions there are:
//
//	result "id"       the result of a tool call of the conversation: .Text is all of it. When its first line starts with
//	                  "exit code N", .ExitCode is N and .Output is what follows that line; otherwise .ExitCode is -1
//	                  and .Output is .Text. A result that is not in the request is an error
//	line N s          the N-th line of s, from 1; negative from the end; empty where there is none
//	lines s           the lines of s
//	match "re" s      the first line of s that the regular expression (RE2) matches, or ""
//	cell N s          the N-th element of the JSON array s, from 1, as text; empty where there is none
//	trim s            s without white space around it
//	contains "part" s tells whether s has the part
//
// Strings in tool call arguments are taken as they are.
package replay
