package pools

// Sizing is what a prediction is asked for: the size of a pool on one node, and the load on it. Of MemoryMiB, ServiceSeconds and
// RestoreSeconds 0 is the server's default.
type Sizing struct {
	MinReady        int     `json:"min_ready"`
	MaxReady        int     `json:"max_ready"`
	MaxMachines     int     `json:"max_machines"`
	MemoryMiB       int     `json:"memory_mib,omitzero"` // of one machine
	ClaimsPerSecond float64 `json:"claims_per_second"`
	ServiceSeconds  float64 `json:"service_seconds,omitzero"` // how long a claim keeps its machine, on average
	RestoreSeconds  float64 `json:"restore_seconds,omitzero"` // how long making a machine takes, on average
}

// Prediction is what a simulation of the pool's own policy gave.
type Prediction struct {
	Claims        int     `json:"claims"` // simulated
	MissRate      float64 `json:"miss_rate"`
	LostShare     float64 `json:"lost_share"` // claims that got no machine at all
	WaitMean      float64 `json:"wait_mean_seconds"`
	WaitP50       float64 `json:"wait_p50_seconds"`
	WaitP95       float64 `json:"wait_p95_seconds"`
	WaitP99       float64 `json:"wait_p99_seconds"`
	MeanReady     float64 `json:"mean_ready"`
	MeanLeased    float64 `json:"mean_leased"`
	PeakMachines  int     `json:"peak_machines"`
	PeakMemoryMiB int     `json:"peak_memory_mib"`
}
