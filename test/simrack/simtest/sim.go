// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// Sim is a running oxide-sim serve.
type Sim struct {
	*Process

	// Host, Token and Project are what a client of the rack's API needs.
	Host, Token, Project string
	// Control is the base URL of the control endpoint.
	Control string
	// Instances are those that the rack was started with.
	Instances []Instance
}

// Instance is an instance of the simulated rack.
type Instance struct {
	Name, ID string
	// Guest is the folder with the guest's dev, sys and metadata.env; empty when guests are off.
	Guest string
}

// readyTimeout is how long a program may take until it serves; the race detector and a busy machine make it slow.
const readyTimeout = 60 * time.Second

// SimOptions say how to start a simulated rack. The zero value is what oxide-sim serve does without flags.
type SimOptions struct {
	// Args are further flags.
	Args []string
	// Stderr gets what the rack prints, too.
	Stderr io.Writer
	// Apart keeps a Ctrl-C at the terminal from the rack; whoever starts it must end it, whatever happens.
	Apart bool
}

// StartSim starts a simulated rack with further flags of oxide-sim serve; see [StartSimWith]. Its stderr goes to also,
// too, where that is set.
func StartSim(program string, also io.Writer, args ...string) (*Sim, error) {
	return StartSimWith(program, SimOptions{Args: args, Stderr: also})
}

// StartSimWith starts a simulated rack on free ports of the loopback address with a control endpoint, and returns when it
// serves.
func StartSimWith(program string, opts SimOptions) (*Sim, error) {
	cmd := exec.Command(
		program,
		append([]string{"serve", "--listen=127.0.0.1:0", "--control=127.0.0.1:0"}, opts.Args...)...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	process, err := start(cmd, opts.Stderr, opts.Apart)
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

// read reads what oxide-sim serve prints until it is ready.
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

// Instance returns one of the instances that the rack was started with.
func (s *Sim) Instance(name string) Instance {
	for _, instance := range s.Instances {
		if instance.Name == name {
			return instance
		}
	}
	panic(fmt.Sprintf("the simulated rack was started without an instance %q", name))
}
