// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"syscall"
)

// TokenPrefix begins every API token. The rack treats a bearer token without it as no credentials
// (docs/reference/rack.md §1).
const TokenPrefix = "oxide-token-"

const redacted = "(redacted)"

// Token holds an API token. Only Reveal returns the token: printing, logging and encoding give "(redacted)". The zero
// value holds no token.
type Token struct {
	// A pointer, because fmt calls no methods of a value in another struct's unexported field. It would print a string,
	// but prints only the address of a pointer.
	value *string
}

// NewToken holds a token.
func NewToken(value string) Token {
	if value == "" {
		return Token{}
	}
	return Token{value: &value}
}

// Reveal returns the token itself, or "".
func (t Token) Reveal() string {
	if t.value == nil {
		return ""
	}
	return *t.value
}

// Empty reports whether there is no token.
func (t Token) Empty() bool { return t.value == nil }

// Equal reports whether both hold the same token.
func (t Token) Equal(other Token) bool { return t.Reveal() == other.Reveal() }

func (t Token) String() string { return redacted }

// GoString is for %#v.
func (t Token) GoString() string { return redacted }

// Format covers the verbs that String does not, such as %x and %d.
func (t Token) Format(f fmt.State, _ rune) {
	_, _ = io.WriteString(f, redacted) // fmt reports no errors
}

// LogValue is for slog.
func (t Token) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalJSON is for encoding/json.
func (t Token) MarshalJSON() ([]byte, error) { return json.Marshal(redacted) }

// MarshalText is for every other encoder.
func (t Token) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// maxTokenBytes is a limit far above the length of a token, in case the path names something else, such as a disk.
const maxTokenBytes = 16 << 10

// readToken reads the token in a file, without the space around it. Its errors have a next step for an operator and
// never quote the file. Callers repeat it when the file changes, so that a token can be rotated.
func readToken(file string) (Token, error) {
	text, err := readFile(file, maxTokenBytes)
	if err != nil {
		return Token{}, fmt.Errorf("%w; name a file that holds the API token and that the plugin may read", err)
	}
	token := strings.TrimSpace(string(text))
	if err := checkToken(token); err != nil {
		return Token{}, fmt.Errorf("%s %w", file, err)
	}
	return NewToken(token), nil
}

// checkToken returns an error if token is not an API token. Callers put the origin of the token in front of its text.
func checkToken(token string) error {
	switch {
	case token == "":
		return errors.New("is empty; it must hold an API token")
	case !strings.HasPrefix(token, TokenPrefix) || token == TokenPrefix:
		return fmt.Errorf("holds no API token: one begins with %s", TokenPrefix)
	}
	for _, c := range []byte(token) {
		if c <= ' ' || c > '~' {
			return errors.New("holds more than an API token: it must be one word of printable ASCII")
		}
	}
	return nil
}

// readFile reads a regular file of at most limit bytes. It rejects a pipe and a device, because reading them could
// block the start for ever.
func readFile(name string, limit int64) ([]byte, error) {
	// O_NONBLOCK, because opening a pipe could block too.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(text)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", name, limit)
	}
	return text, nil
}
