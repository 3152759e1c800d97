#!/usr/bin/env bash
# An error of the Oxide SDK shows a body that is not JSON, and hides one that is JSON of somebody else.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   the text of an error has either the code and message of the rack, or, if the response is not the rack's, its
#          body. So what a proxy says can always be read.
# Seen:    a proxy's text is shown. A proxy's JSON is not: the error has an empty code, an empty message and an empty
#          request ID, and the body is only in the field RawBody. A test for a nil ErrorResponse does not notice it.
# Why:     any JSON object can be read as the rack's type of error, whose fields then stay empty.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/oxidecomputer/oxide.go v0.10.0
END
cat >main.go <<'END'
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

func main() {
	for _, body := range []string{"upstream is down", `{"reason":"upstream is down"}`} {
		proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusBadGateway)
			_, _ = w.Write([]byte(body))
		}))
		client, err := oxide.NewClient(oxide.WithHost(proxy.URL), oxide.WithToken("t"))
		if err != nil {
			panic(err)
		}
		_, err = client.Ping(context.Background())
		var failed *oxide.HTTPError
		if !errors.As(err, &failed) {
			panic(err)
		}
		fmt.Println("in the text:", strings.Contains(err.Error(), "upstream is down"),
			"in RawBody:", strings.Contains(failed.RawBody, "upstream is down"),
			"ErrorResponse is nil:", failed.ErrorResponse == nil)
		proxy.Close()
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
in the text: true in RawBody: true ErrorResponse is nil: true
in the text: false in RawBody: true ErrorResponse is nil: false
END
echo "still so: JSON of a proxy is not in the text of the error"
