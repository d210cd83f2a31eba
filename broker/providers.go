package broker

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/ephemeral-run/ephemeral/broker/secret"
)

// maxProviderFile bounds a provider file in bytes.
const maxProviderFile = 1 << 20

// providerFile is the form of a file of providers.
type providerFile struct {
	Providers map[string]providerEntry `yaml:"providers"`
}

type providerEntry struct {
	BaseURL     string            `yaml:"base_url"`
	APIKey      string            `yaml:"api_key"`
	APIKeyFile  string            `yaml:"api_key_file"`
	Headers     map[string]string `yaml:"headers"`
	LimitField  string            `yaml:"limit_field"`
	StreamUsage *bool             `yaml:"stream_usage"`
}

var (
	providerPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,31}$`)
	headerPattern   = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$")
)

// upstreamProviders are the providers of the environment and of the file; those of the file come first. The official
// service is none without a key.
func upstreamProviders(cfg Config) (map[string]*provider, error) {
	all := map[string]*provider{}
	entries, err := readProviders(cfg.ProviderFile)
	if err != nil {
		return nil, err
	}
	if _, named := entries["openai"]; !named {
		openAI := providerEntry{BaseURL: cfg.OpenAIBaseURL, APIKey: string(cfg.OpenAIAPIKey), LimitField: cfg.OpenAILimit}
		if p, err := openAI.provider("openai"); err != nil {
			return nil, fmt.Errorf("provider openai: %w", err)
		} else if p != nil {
			all["openai"] = p
		}
	}
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		if !providerPattern.MatchString(name) || name == "replay" {
			return nil, fmt.Errorf("provider %.40q: want a name of a-z, 0-9, _ and - other than replay", name)
		}
		p, err := entries[name].provider(name)
		if err != nil {
			return nil, fmt.Errorf("provider %s: %w", name, err)
		}
		if p == nil {
			return nil, fmt.Errorf("provider %s: the official service wants a key", name)
		}
		all[name] = p
	}
	return all, nil
}

// readProviders reads the file, which only its owner may read when it holds keys. Errors never show what is in it.
func readProviders(path string) (map[string]providerEntry, error) {
	if path == "" {
		return nil, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("provider file: %w", err)
	}
	if info.Size() > maxProviderFile {
		return nil, fmt.Errorf("provider file %s: %d bytes, at most %d are read", path, info.Size(), maxProviderFile)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("provider file: %w", err)
	}
	var f providerFile
	if err := yaml.UnmarshalWithOptions(data, &f, yaml.Strict()); err != nil {
		return nil, fmt.Errorf("provider file %s is not of the documented form", path) // the parser's error quotes the file
	}
	for name, e := range f.Providers {
		if (e.APIKey != "" || len(e.Headers) > 0) && info.Mode().Perm()&0o077 != 0 {
			return nil, fmt.Errorf("provider file %s holds secrets of %s, and others than its owner may use it: chmod 600 it", path, name)
		}
	}
	return f.Providers, nil
}

// provider makes a provider; nil: the official service without a key is no use.
func (e providerEntry) provider(name string) (*provider, error) {
	base, err := url.Parse(e.BaseURL)
	if err != nil {
		return nil, errors.New("the base URL is no URL") // the parser's error would show it, and it may hold a password
	}
	if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" || base.User != nil || base.RawQuery != "" || base.Fragment != "" {
		return nil, errors.New("the base URL must be http(s)://host[:port][/path]")
	}
	key, err := e.key()
	if err != nil {
		return nil, err
	}
	official := base.Hostname() == "api.openai.com"
	if official && key == "" {
		return nil, nil
	}
	limit := e.LimitField
	switch {
	case limit == "" && official:
		limit = fieldMaxCompletionTokens
	case limit == "":
		limit = fieldMaxTokens
	case limit != fieldMaxTokens && limit != fieldMaxCompletionTokens:
		return nil, fmt.Errorf("limit field %q: want %s or %s", limit, fieldMaxTokens, fieldMaxCompletionTokens)
	}
	headers, err := e.headers()
	if err != nil {
		return nil, err
	}
	transport := providerTransport()
	return &provider{
		name: name, url: base.JoinPath("chat", "completions").String(), key: key, headers: headers, limitField: limit,
		streamUsage: e.StreamUsage == nil || *e.StreamUsage,
		client:      transport, has: func(string) bool { return true }, close: transport.CloseIdleConnections,
	}, nil
}

func (e providerEntry) key() (secret.Value, error) {
	key := e.APIKey
	if e.APIKeyFile != "" {
		if key != "" {
			return "", errors.New("api_key and api_key_file are both given")
		}
		data, err := os.ReadFile(e.APIKeyFile)
		if err != nil {
			return "", fmt.Errorf("API key file: %w", err)
		}
		key = strings.TrimRight(string(data), "\r\n")
	}
	if strings.ContainsAny(key, "\r\n\x00") {
		return "", errors.New("the API key holds a line break")
	}
	return secret.Value(key), nil
}

// ownHeaders are the headers that the broker makes itself.
var ownHeaders = []string{"Host", "Content-Length", "Content-Type", "Transfer-Encoding", "Connection", "Accept", "Accept-Encoding"}

func (e providerEntry) headers() (map[string]secret.Value, error) {
	all := map[string]secret.Value{}
	for name, value := range e.Headers {
		canonical := http.CanonicalHeaderKey(name)
		if !headerPattern.MatchString(name) || slices.Contains(ownHeaders, canonical) || strings.ContainsAny(value, "\r\n\x00") {
			return nil, fmt.Errorf("header %.64q cannot be sent", name)
		}
		all[canonical] = secret.Value(value)
	}
	return all, nil
}

func providerTransport() *http.Transport {
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		ForceAttemptHTTP2:      true,
		MaxIdleConns:           256,
		MaxIdleConnsPerHost:    64,
		IdleConnTimeout:        90 * time.Second,
		TLSHandshakeTimeout:    10 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
		DisableCompression:     true, // a compressed answer could not be bounded, nor streamed at once
	}
}

// secrets are what must never be seen of a provider.
func (p *provider) secrets() []secret.Value {
	var all []secret.Value
	if p.key != "" {
		all = append(all, p.key)
	}
	for _, v := range p.headers {
		all = append(all, v)
	}
	return all
}
