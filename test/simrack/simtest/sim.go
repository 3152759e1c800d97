// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Sim is a running oxide-sim serve.
type Sim struct {
	*Process

	// Host, Token and Project configure a client of the rack's API.
	Host, Token, Project string
	// CAFile is the path of the CA's certificate, empty for plain HTTP.
	CAFile string
	// Control is the base URL of the control endpoint.
	Control string
	// Instances are the instances that exist at the start of the rack.
	Instances []Instance
}

// Instance is an instance of the simulated rack.
type Instance struct {
	Name, ID string
	// Guest is the folder with the guest's dev, sys and metadata.env; empty without guests.
	Guest string
}

// readyTimeout is the time that a program may take to get ready. The race detector and a busy machine make it slow.
const readyTimeout = 60 * time.Second

// SimOptions configure [StartSimWith]. The zero value means oxide-sim serve without further flags.
type SimOptions struct {
	// Args are further flags.
	Args []string
	// Stderr also receives the rack's stderr.
	Stderr io.Writer
	// OwnProcessGroup keeps a Ctrl-C at the terminal from the rack. The caller must then always end the rack.
	OwnProcessGroup bool
}

// StartSim starts a simulated rack with further flags of oxide-sim serve; see [StartSimWith]. A non-nil also receives a
// copy of its stderr.
func StartSim(program string, also io.Writer, args ...string) (*Sim, error) {
	return StartSimWith(program, SimOptions{Args: args, Stderr: also})
}

// StartSimWith starts a simulated rack on free loopback ports with a control endpoint. It returns when the rack is
// ready.
func StartSimWith(program string, opts SimOptions) (*Sim, error) {
	cmd := exec.Command(
		program,
		append([]string{"serve", "--listen=127.0.0.1:0", "--control=127.0.0.1:0"}, opts.Args...)...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	process, err := start(cmd, opts.Stderr, opts.OwnProcessGroup)
	if err != nil {
		return nil, err
	}
	sim := &Sim{Process: process}
	ready := make(chan error, 1)
	go func() { ready <- sim.read(stdout) }()
	select {
	case err = <-ready:
	case <-time.After(readyTimeout):
		err = fmt.Errorf("oxide-sim does not serve after %s", readyTimeout)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %s", err, process.Stderr()), process.Kill())
	}
	return sim, nil
}

// read reads the stdout of oxide-sim serve up to the line "# ready".
func (s *Sim) read(stdout io.Reader) error {
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		line := lines.Text()
		if line == "# ready" {
			return nil
		}
		if fields := strings.SplitN(line, " ", 4); len(fields) == 4 && fields[0] == "#" {
			instance := Instance{Name: fields[1], ID: fields[2], Guest: fields[3]}
			if instance.Guest == "-" {
				instance.Guest = ""
			}
			s.Instances = append(s.Instances, instance)
			continue
		}
		switch key, value, _ := strings.Cut(line, "="); key {
		case "OXIDE_HOST":
			s.Host = value
		case "OXIDE_CSI_CA_FILE":
			s.CAFile = value
		case "OXIDE_TOKEN":
			s.Token = value
		case "OXIDE_PROJECT":
			s.Project = value
		case "OXIDE_SIM_CONTROL":
			s.Control = value
		default:
			return fmt.Errorf("oxide-sim printed %q", line)
		}
	}
	return errors.Join(errors.New("oxide-sim ended before it was ready"), lines.Err())
}

// silence is how long a connection of [Sim.Client] may be silent before a ping, and after it.
const silence = 2 * time.Second

// Client returns a client of the rack's API with the rack's token.
func (s *Sim) Client() (*oxide.Client, error) {
	client := &http.Client{}
	if s.CAFile != "" {
		text, err := os.ReadFile(s.CAFile)
		if err != nil {
			return nil, err
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate", s.CAFile)
		}
		client.Transport = &http.Transport{
			TLSClientConfig:   &tls.Config{RootCAs: roots},
			ForceAttemptHTTP2: true,
			// Without pings the fault [FaultSilent] would stop this client for ever.
			HTTP2: &http.HTTP2Config{SendPingTimeout: silence, PingTimeout: silence},
		}
	}
	return oxide.NewClient(oxide.WithHost(s.Host), oxide.WithToken(s.Token), oxide.WithHTTPClient(client))
}

// Instance returns an instance that exists since the start of the rack.
func (s *Sim) Instance(name string) Instance {
	for _, instance := range s.Instances {
		if instance.Name == name {
			return instance
		}
	}
	panic(fmt.Sprintf("the simulated rack was started without an instance %q", name))
}
