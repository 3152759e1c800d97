// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command agent is the test's hand inside the guest: it runs commands there, and leads to the plugin's socket. It listens
// on TCP port 9000, where QEMU's user network lets the test in and nobody else.
//
//   - POST /exec with a script: runs it with sh and answers a [Result] as JSON. Ends with the request.
//   - CONNECT /path/of/a/socket: a connection to that unix socket, so that the test speaks gRPC with the plugin.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"os/exec"
	"time"
)

// Result is what a script left behind.
type Result struct {
	// Code is its exit code, -1 when a signal ended it.
	Code           int
	Stdout, Stderr string
}

func main() {
	log.Fatal(http.ListenAndServe(":9000", http.HandlerFunc(serve)))
}

func serve(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodConnect:
		connect(w, r.URL.Path)
	case r.Method == http.MethodPost && r.URL.Path == "/exec":
		run(w, r)
	default:
		http.NotFound(w, r)
	}
}

func run(w http.ResponseWriter, r *http.Request) {
	script, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(r.Context(), "sh", "-c", string(script))
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	// What the script leaves running in the background must not hold the answer.
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	result := Result{Code: cmd.ProcessState.ExitCode(), Stdout: stdout.String(), Stderr: stderr.String()}
	if err := json.NewEncoder(w).Encode(result); err != nil {
		log.Print(err) // the test has gone
	}
}

func connect(w http.ResponseWriter, socket string) {
	to, err := net.Dial("unix", socket)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer to.Close()
	from, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		log.Print(err)
		return
	}
	defer from.Close()
	if _, err := io.WriteString(from, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		log.Print(err)
		return
	}
	done := make(chan error, 2)
	go func() {
		_, err := io.Copy(to, buffered)
		done <- err
	}()
	go func() {
		_, err := io.Copy(from, to)
		done <- err
	}()
	// When one side has ended, the other gets nothing more to do: gRPC never half-closes.
	if err := <-done; err != nil {
		log.Print(err)
	}
}
