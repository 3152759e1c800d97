// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package static

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// settleTime is how long a file must be unchanged before it is accepted. A program that writes in place leaves
	// the file half written for a moment. An ID without its rack would put the node on the wrong rack.
	settleTime = 100 * time.Millisecond
	// maxRounds bounds the wait for a file that keeps changing, to about 2 s.
	maxRounds = 20
	// maxBytes is a limit far above the size of such a file.
	maxBytes = 64 << 10
)

var (
	errNotAFile = errors.New("is not a regular file")
	errTooLarge = fmt.Errorf("is larger than %d bytes", maxBytes)
	errChanging = errors.New("keeps changing while it is read")
)

// readSettled returns the whole content of a file. It waits while the file changes.
func readSettled(ctx context.Context, name string) ([]byte, error) {
	for range maxRounds {
		text, before, err := readOnce(name)
		if err != nil {
			return nil, err
		}
		// A time in the future makes the age negative. Then wait no longer than settleTime.
		if age := time.Since(before.ModTime()); age < settleTime {
			if err := wait(ctx, min(settleTime-age, settleTime)); err != nil {
				return nil, err
			}
		}
		after, err := os.Stat(name)
		if err != nil {
			return nil, err
		}
		if os.SameFile(before, after) && before.Size() == after.Size() && before.ModTime().Equal(after.ModTime()) &&
			int64(len(text)) == after.Size() {
			return text, nil
		}
	}
	return nil, errChanging
}

// readOnce reads a file, and returns its state from before.
func readOnce(name string) ([]byte, os.FileInfo, error) {
	// O_NONBLOCK, because opening a pipe could block for ever.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, errNotAFile
	}
	text, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err != nil {
		return nil, nil, err
	}
	if len(text) > maxBytes {
		return nil, nil, errTooLarge
	}
	return text, info, nil
}

// wait returns nil after d, or the error of ctx if ctx ends first.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var keyPattern = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// parse reads the lines of an env file. It returns the values of the two known keys, and the names of all other keys.
// Errors contain the number of the line and never its text: the file may hold passwords.
func parse(file string, text []byte) (found map[string]value, unknown []string, err error) {
	found = map[string]value{}
	for i, line := range strings.Split(strings.TrimPrefix(string(text), "\ufeff"), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if rest, ok := strings.CutPrefix(line, "export"); ok && strings.TrimLeft(rest, " \t") != rest {
			line = rest
		}
		key, raw, ok := strings.Cut(line, "=")
		key = strings.TrimSpace(key)
		if !ok || !keyPattern.MatchString(key) {
			return nil, nil, lineError(file, i, "is not KEY=VALUE", "write one KEY=VALUE per line")
		}
		if key != keyInstanceID && key != keyRack {
			unknown = append(unknown, key)
			continue
		}
		text, ok := unquote(strings.TrimSpace(raw))
		if !ok {
			return nil, nil, lineError(file, i, "has an unclosed quote, or text after the closing quote", "write "+key+"=value")
		}
		if first, twice := found[key]; twice && !sameValue(first.text, text) {
			return nil, nil, lineError(file, i, fmt.Sprintf("sets %s to another value than line %d", key, first.line),
				"delete the wrong line")
		}
		found[key] = value{text: text, from: fmt.Sprintf("%s in %s line %d", key, file, i+1), line: i + 1}
	}
	return found, unknown, nil
}

// unquote removes quotes and a comment from a value. It expands nothing and knows no escapes, since no identity needs
// them. A backslash or a dollar sign stays, and makes the value invalid.
func unquote(raw string) (string, bool) {
	if raw == "" || raw[0] == '#' {
		return "", true
	}
	if quote := raw[0]; quote == '"' || quote == '\'' {
		text, rest, ok := strings.Cut(raw[1:], string(quote))
		rest = strings.TrimSpace(rest)
		return text, ok && (rest == "" || rest[0] == '#')
	}
	for _, comment := range []string{" #", "\t#"} {
		raw, _, _ = strings.Cut(raw, comment)
	}
	return strings.TrimSpace(raw), true
}

func lineError(file string, index int, what, next string) error {
	return metadata.Invalid(fmt.Sprintf("%s line %d %s", file, index+1, what), nil, next)
}
