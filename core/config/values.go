// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes, written with a unit such as "32GiB".
type Size int64

// sizeUnits are the units that users write. The binary ones come first, the largest first. Kubernetes leaves out the B.
var sizeUnits = []struct {
	names []string
	bytes Size
}{
	{[]string{"TiB", "Ti"}, 1 << 40},
	{[]string{"GiB", "Gi"}, 1 << 30},
	{[]string{"MiB", "Mi"}, 1 << 20},
	{[]string{"KiB", "Ki"}, 1 << 10},
	{[]string{"B"}, 1},
	{[]string{"TB", "T"}, 1e12},
	{[]string{"GB", "G"}, 1e9},
	{[]string{"MB", "M"}, 1e6},
	{[]string{"kB", "KB", "k", "K"}, 1e3},
}

// String writes s with the largest binary unit that divides it.
func (s Size) String() string {
	for _, unit := range sizeUnits {
		if s != 0 && s%unit.bytes == 0 {
			return strconv.FormatInt(int64(s/unit.bytes), 10) + unit.names[0]
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// parseSize rejects a number without a unit, except 0: users write 20 and mean 20GiB.
func parseSize(text string) (Size, error) {
	digits := len(text) - len(strings.TrimLeft(text, "0123456789"))
	n, err := strconv.ParseUint(text[:digits], 10, 63)
	if err == nil && digits == len(text) && n == 0 {
		return 0, nil
	}
	for _, unit := range sizeUnits {
		if err == nil && slices.Contains(unit.names, text[digits:]) && n <= uint64(math.MaxInt64/unit.bytes) {
			return Size(n) * unit.bytes, nil
		}
	}
	return 0, errors.New("is not a size: write a whole number with a unit, such as 20GiB, 20Gi or 20G")
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
			return "", fmt.Errorf("%q is not a unix socket; write unix:///csi/csi.sock", endpoint)
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
		return "", fmt.Errorf("the path has %d bytes, more than the limit of %d; use a shorter path", len(path),
			maxSocketPath)
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
	return (&url.URL{Scheme: u.Scheme, Host: u.Host}).String(), nil // with the zone of an address escaped
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
	ip, err := netip.ParseAddr(u.Hostname()) // also with a zone
	return u.Hostname() == "localhost" || err == nil && ip.IsLoopback()
}
