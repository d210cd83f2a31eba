package run

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"

	fastjson "github.com/segmentio/encoding/json"
)

// Content is what a client or its run wrote: prompt, command, files, metadata, output, event text. This file says what
// of each thing remains without it.

// split returns the spec as the record keeps it, and whether that is the whole spec. Without content it is left with
// what money and machines need; otherwise only the bytes of the files are kept apart.
func (sp Spec) split() (kept Spec, whole bool) {
	if sp.ZeroDataRetention {
		return sp.bare(), false
	}
	if !slices.ContainsFunc(sp.Files, func(f File) bool { return f.Content != "" }) {
		return sp, true
	}
	files := make([]File, len(sp.Files))
	for i, f := range sp.Files {
		files[i] = File{Path: f.Path, Upload: f.Upload, Encoding: f.Encoding, Mode: f.Mode}
	}
	sp.Files = files
	return sp, false
}

// bare is the spec without content.
func (sp Spec) bare() Spec {
	return Spec{Model: sp.Model, Image: sp.Image, Web: sp.Web, Shell: sp.Shell, ExposeBroker: sp.ExposeBroker, TimeoutSeconds: sp.TimeoutSeconds,
		MaxCostMicros: sp.MaxCostMicros, ZeroDataRetention: sp.ZeroDataRetention, RetentionSeconds: sp.RetentionSeconds,
		Traceparent: sp.Traceparent}
}

// bareData is the data of an event without content.
func bareData(data any) any {
	switch d := data.(type) {
	case ShellData:
		d.Command, d.Output, d.Encoding = "", "", ""
		return d
	case *ShellData:
		return bareData(*d)
	case FilesData:
		d.Names = nil
		return d
	case *FilesData:
		return bareData(*d)
	case MicroVMDestroyedData:
		d.Attempts = nil
		return d
	case *MicroVMDestroyedData:
		return bareData(*d)
	case CallData:
		d.Target, d.Error = "", ""
		return d
	case *CallData:
		return bareData(*d)
	case ModelData:
		d.Error = ""
		return d
	case *ModelData:
		return bareData(*d)
	case EndedData:
		d.Output, d.Error = "", d.Error.bare()
		return d
	case *EndedData:
		return bareData(*d)
	}
	return data
}

// bare keeps the code alone: the sentence may quote what the run wrote.
func (e *Error) bare() *Error {
	if e == nil {
		return nil
	}
	return &Error{Code: e.Code}
}

// bytes is what the stream holds, undecoded by nothing: the command's own bytes.
func (st *Stream) bytes() ([]byte, error) {
	if st == nil {
		return nil, nil
	}
	switch st.Encoding {
	case "":
		return []byte(st.Content), nil
	case "base64":
		b, err := base64.StdEncoding.DecodeString(st.Content)
		if err != nil {
			return nil, fmt.Errorf("content is not base64: %w", err)
		}
		return b, nil
	}
	return nil, fmt.Errorf("encoding %.20q: want none or base64", st.Encoding)
}

// NewStream makes a stream of the bytes kept of a command's output, of which it wrote total: as text when they are
// valid UTF-8, in base64 otherwise.
func NewStream(kept []byte, total int64) *Stream {
	st := &Stream{Bytes: total, Truncated: int64(len(kept)) < total}
	if utf8.Valid(kept) {
		st.Content = string(kept)
	} else {
		st.Content, st.Encoding = base64.StdEncoding.EncodeToString(kept), "base64"
	}
	return st
}

// encode is json.Marshal for values of this package, with what was encoded in the error. Nil is no data at all.
func encode(what string, v any) (string, error) {
	if v == nil {
		return "", nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode %s: %w", what, err)
	}
	return string(b), nil
}

// encodeWhole encodes a spec with its files, which may be large: encoding/json would have them in memory three times for it.
func encodeWhole(sp *Spec) ([]byte, error) {
	size := 4 << 10
	for _, f := range sp.Files {
		size += len(f.Content) + len(f.Content)/16
	}
	b, err := fastjson.Append(make([]byte, 0, size), sp, fastjson.SortMapKeys)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	return b, nil
}

// mustEncode is for values of this package that always encode.
func mustEncode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}
