package run

// Event is one entry of a run's timeline.
type Event struct {
	Seq  int64     `json:"seq"` // 1, 2, 3 ... without gaps within the run
	Run  ID        `json:"run"`
	Type EventType `json:"type"`
	At   float64   `json:"at_ms"` // milliseconds since the run was queued, host clock, never going back
	Data any       `json:"data,omitempty"`
}

// EventType says what happened. The terminal states are event types of the same name.
type EventType string

// The event types, in the order in which a run has them.
const (
	EventQueued           EventType = "queued"            // Data: QueuedData
	EventMicroVMReady     EventType = "microvm.ready"     // Data: MicroVMReadyData
	EventWorkerStarted    EventType = "worker.started"    // Data: WorkerStartedData
	EventModel            EventType = "model"             // Data: ModelData
	EventShell            EventType = "shell"             // Data: ShellData
	EventWeb              EventType = "web"               // Data: CallData
	EventConnection       EventType = "connection"        // Data: CallData
	EventRefused          EventType = "broker.refused"    // Data: RefusedData
	EventBudgetWarning    EventType = "budget.warning"    // Data: BudgetWarningData
	EventFiles            EventType = "files"             // Data: FilesData; only where there is something to tell
	EventMicroVMDestroyed EventType = "microvm.destroyed" // Data: MicroVMDestroyedData
	EventWorkerDestroyed  EventType = "worker.destroyed"  // Data: Money; the last event of every run
)

// QueuedData is the data of a queued event.
type QueuedData struct {
	Reserved Micros `json:"reserved_micros"`
	Place
}

// MicroVMReadyData is the data of a microvm.ready event.
type MicroVMReadyData struct {
	Machine   string `json:"machine"`
	Image     string `json:"image"`
	Isolation string `json:"isolation"`
}

// WorkerStartedData is the data of a worker.started event.
type WorkerStartedData struct {
	Shell bool `json:"shell"`
	Web   bool `json:"web"`
}

// ModelData is the data of a model event. It carries no content.
type ModelData struct {
	Model        string `json:"model"`
	Status       int    `json:"status"` // of the upstream's answer; 0 if there was none
	InputTokens  int64  `json:"input_tokens"`
	OutputTokens int64  `json:"output_tokens"`
	// CachedTokens of the input were read from the provider's cache; ReasoningTokens of the output nobody sees.
	CachedTokens    int64   `json:"cached_tokens,omitempty"`
	ReasoningTokens int64   `json:"reasoning_tokens,omitempty"`
	Duration        float64 `json:"duration_ms"`
	Charged         Micros  `json:"charged_micros"`
	Estimated       bool    `json:"estimated,omitempty"` // the upstream gave no usage; charged by the documented rule
	Error           string  `json:"error,omitempty"`

	Receipt *Receipt `json:"receipt,omitempty"`
}

// ShellData is the data of a shell event. Command and Output are content.
type ShellData struct {
	Command   string  `json:"command,omitempty"`
	Outcome   string  `json:"outcome"`   // exited, signalled, timed_out, killed, not_found, out_of_memory, lost
	ExitCode  int     `json:"exit_code"` // 128+n for signal n; -1 when lost
	Duration  float64 `json:"duration_ms"`
	Output    string  `json:"output,omitempty"`   // standard output and error as they came, bounded
	Encoding  string  `json:"encoding,omitempty"` // "" or "base64", of Output
	Bytes     int64   `json:"bytes"`              // written in all
	Truncated bool    `json:"truncated,omitempty"`
	// MemoryLimit is set when the kernel killed a process of the command for want of memory: the limit in bytes.
	MemoryLimit int64 `json:"memory_limit_bytes,omitempty"`
	// FullMounts are the mount points that had no space left while the command ran or when it ended.
	FullMounts []string `json:"full_mounts,omitempty"`
}

// FilesData is the data of a files event. Files is content.
type FilesData struct {
	Files
	Names []Artifact `json:"names,omitempty"` // the first 100
}

// CallData is the data of web and connection events.
type CallData struct {
	Kind     string  `json:"kind"` // http, postgres, fetch, search
	Target   string  `json:"target,omitempty"`
	Method   string  `json:"method,omitempty"`
	Status   int     `json:"status"` // of the upstream's answer; 0 if there was none
	Bytes    int64   `json:"bytes"`
	Duration float64 `json:"duration_ms"`
	Charged  Micros  `json:"charged_micros"`
	Error    string  `json:"error,omitempty"`

	Receipt *Receipt `json:"receipt,omitempty"`
}

// Receipt is the broker's signature on the data of a model, web or connection event; see package run/receipt.
type Receipt struct {
	Call      string `json:"call"`      // id of the call, at the run's ledger too
	Number    int64  `json:"number"`    // 1, 2, 3 ... within the run: a missing one shows
	At        int64  `json:"at_us"`     // when the call had ended, microseconds since 1970 (UTC)
	Key       string `json:"key"`       // id of the public key
	Signature string `json:"signature"` // base64 (RFC 4648) of 64 bytes, Ed25519 (RFC 8032)
}

// RefusedData is the data of a broker.refused event: the machine asked the broker for what it may not, or in a way that
// makes no sense. Of many refusals with one code only the 1st, 2nd, 4th, 8th ... is an event, with the count so far.
type RefusedData struct {
	Code  string `json:"code"`
	Count int64  `json:"count"`
}

// BudgetWarningData is the data of a budget.warning event: 90 percent of the hold are charged. Pending is what calls under
// way have set aside of the rest.
type BudgetWarningData struct {
	Reserved Micros `json:"reserved_micros"`
	Charged  Micros `json:"charged_micros"`
	Pending  Micros `json:"pending_micros"`
}

// MicroVMDestroyedData is the data of a microvm.destroyed event.
type MicroVMDestroyedData struct {
	Egress
	Attempts *EgressAttempts `json:"egress_attempts,omitempty"`
}

// EndedData is the data of the event named after the terminal state.
type EndedData struct {
	ModelCalls int64  `json:"model_calls"`
	Tokens     int64  `json:"tokens"`
	Output     string `json:"output,omitempty"`
	ExitCode   *int   `json:"exit_code,omitempty"`
	Error      *Error `json:"error,omitempty"`
}
