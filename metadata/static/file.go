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
	// settleTime is how long a file must have been left alone before its content
	// counts: a writer that does not rename leaves it half written for a moment,
	// and the ID without the rack would put the node on the wrong one.
	settleTime = 100 * time.Millisecond
	// maxRounds bounds the waiting for a file that never stops changing, where
	// the caller gave no deadline: about 2 s.
	maxRounds = 20
	// maxBytes is far above any such file.
	maxBytes = 64 << 10
)

var (
	errNotAFile = errors.New("is not a regular file")
	errTooLarge = fmt.Errorf("is larger than %d bytes", maxBytes)
	errChanging = errors.New("keeps changing while it is read")
)

// readSettled returns the whole content of a file that nobody is writing. It
// waits while somebody is.
func readSettled(ctx context.Context, name string) ([]byte, error) {
	for range maxRounds {
		text, before, err := readOnce(name)
		if err != nil {
			return nil, err
		}
		// A time stamp in the future says nothing about how long ago it was set.
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

// readOnce reads a file as it is, and says how it looked before.
func readOnce(name string) ([]byte, os.FileInfo, error) {
	// Opening or reading a pipe could block for ever, without a context.
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

// wait returns nil after d, or the context's error if that ends first.
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

// parse reads the lines of an env file. It returns our two keys and the names of
// all others. Errors name the line and never repeat it: other people's files
// hold passwords.
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
			return nil, nil, lineError(file, i, "has a quote without its pair, or text after it", "write "+key+"=value")
		}
		if first, twice := found[key]; twice && !sameValue(first.text, text) {
			return nil, nil, lineError(
				file,
				i,
				fmt.Sprintf("sets %s to another value than line %d", key, first.line),
				"keep the true one",
			)
		}
		found[key] = value{text: text, from: fmt.Sprintf("%s in %s line %d", key, file, i+1), line: i + 1}
	}
	return found, unknown, nil
}

// unquote takes a pair of quotes and a comment off a value. Nothing is expanded
// and there are no escapes: no identity needs them, so a backslash or a dollar
// sign stays and is refused with the value.
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
	return &metadata.Error{Kind: metadata.ErrInvalid, What: fmt.Sprintf("%s line %d %s", file, index+1, what), Next: next}
}
