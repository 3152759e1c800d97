// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/url"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes, written as "32GiB" or as plain bytes.
type Size int64

var sizeUnits = []struct {
	name  string
	bytes Size
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// String writes s with the largest unit that divides it.
func (s Size) String() string {
	for _, unit := range sizeUnits {
		if s != 0 && s%unit.bytes == 0 {
			return strconv.FormatInt(int64(s/unit.bytes), 10) + unit.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

func parseSize(text string) (Size, error) {
	number, factor := text, Size(1)
	for _, unit := range sizeUnits {
		if n, ok := strings.CutSuffix(text, unit.name); ok {
			number, factor = n, unit.bytes
		}
	}
	n, err := strconv.ParseUint(number, 10, 63)
	if err != nil || n > uint64(math.MaxInt64/factor) {
		return 0, errors.New("is not a size; write bytes, or a whole number of KiB, MiB, GiB or TiB such as 32GiB")
	}
	return Size(n) * factor, nil
}

var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
}

// decode parses text as a value of one of Config's types. Callers put the quoted text in front of its error. Validate
// checks the value.
func decode(text string, typ reflect.Type) (any, error) {
	switch typ {
	case reflect.TypeFor[string]():
		return text, nil
	case reflect.TypeFor[Mode]():
		return Mode(text), nil
	case reflect.TypeFor[Token]():
		return NewToken(text), nil
	case reflect.TypeFor[Size]():
		return parseSize(text)
	case reflect.TypeFor[int]():
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, errors.New("is not a whole number")
		}
		return n, nil
	case reflect.TypeFor[bool]():
		b, err := strconv.ParseBool(text)
		if err != nil {
			return nil, errors.New("is neither true nor false")
		}
		return b, nil
	case reflect.TypeFor[time.Duration]():
		d, err := time.ParseDuration(text)
		if err != nil {
			return nil, errors.New("is not a duration; write a number and a unit such as 60s or 5m")
		}
		return d, nil
	case reflect.TypeFor[slog.Level]():
		level, ok := logLevels[text]
		if !ok {
			return nil, errors.New("is not one of debug, info, warn, error")
		}
		return level, nil
	}
	panic("config: no decoder for " + typ.String())
}

// maxSocketPath is the size of sockaddr_un.sun_path less the closing NUL.
const maxSocketPath = 107

// socketPath returns the absolute path of the socket that an endpoint names. The CSI specification allows only unix
// sockets (CSI_ENDPOINT). It is idempotent.
func socketPath(endpoint string) (string, error) {
	path := endpoint
	if scheme, rest, ok := strings.Cut(endpoint, "://"); ok {
		if !strings.EqualFold(scheme, "unix") {
			return "", fmt.Errorf(
				"%q is not a unix socket; write unix:///csi/csi.sock",
				endpoint,
			)
		}
		first, _, _ := strings.Cut(rest, "/")
		if first == "." || first == ".." {
			return "", fmt.Errorf("%q is relative; write the whole path, such as unix:///csi/csi.sock", endpoint)
		}
		// Two slashes instead of three are a common mistake. A unix socket has no host.
		path = "/" + strings.TrimPrefix(rest, "/")
	} else if rest, ok := strings.CutPrefix(endpoint, "unix:"); ok {
		path = rest
	}
	switch {
	case !filepath.IsAbs(path):
		return "", fmt.Errorf("%q is not an absolute path; write one such as unix:///csi/csi.sock", endpoint)
	case strings.HasSuffix(path, "/"):
		return "", fmt.Errorf("%q names a directory; name the socket in it, such as unix:///csi/csi.sock", endpoint)
	case strings.ContainsRune(path, 0):
		return "", fmt.Errorf("%q holds a NUL byte", endpoint)
	}
	path = filepath.Clean(path)
	if len(path) > maxSocketPath {
		return "", fmt.Errorf(
			"the path has %d bytes, more than the limit of %d; use a shorter path",
			len(path),
			maxSocketPath,
		)
	}
	return path, nil
}

// hostURL returns the base URL of a host. It is idempotent. Its error does not quote a host that may hold a password.
func hostURL(host string) (string, error) {
	text := host
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	u, err := url.Parse(text)
	switch {
	case strings.Contains(text, "@"):
		return "", errors.New("must not hold a user or password; access comes from the token")
	case err != nil || u.Hostname() == "" || !validPort(u.Port(), u.Host):
		return "", fmt.Errorf("%q names no host; write https://name or https://name:port", host)
	case u.Scheme != "https" && u.Scheme != "http":
		return "", fmt.Errorf("%q is not an https URL", host)
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || strings.Contains(text, "#"):
		return "", fmt.Errorf("%q has more than a host and a port; write https://name or https://name:port", host)
	}
	return u.Scheme + "://" + u.Host, nil
}

// validPort reports whether port is a valid port, or host has none.
func validPort(port, host string) bool {
	if port == "" {
		return !strings.HasSuffix(host, ":")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// isLoopback reports whether a base URL is on this machine.
func isLoopback(base string) bool {
	u, err := url.Parse(base)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}
