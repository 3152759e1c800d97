// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command agent runs commands in the guest for the test, and connects it to the plugin's socket. It listens on TCP
// port 9000, which only the test can reach, through QEMU's user network.
//
//   - POST /exec with a script: runs the script with sh and returns a [Result] as JSON. The script ends with the
//     request.
//   - CONNECT /path/of/a/socket: a connection to that unix socket, so that the test speaks gRPC with the plugin.
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

// Result is the result of a script.
type Result struct {
	// Code is the exit code, -1 if a signal ended the script.
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
	// Background processes of the script must not delay the answer.
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	result := Result{Code: cmd.ProcessState.ExitCode(), Stdout: stdout.String(), Stderr: stderr.String()}
	if err := json.NewEncoder(w).Encode(result); err != nil {
		log.Print(err) // the test has disconnected
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
	// When one side has ended, the other needs no more data: gRPC never half-closes.
	if err := <-done; err != nil {
		log.Print(err)
	}
}
