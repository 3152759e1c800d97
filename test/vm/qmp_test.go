// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// qmp is the connection to QEMU's control socket. A machine has one, and calls run one after another.
type qmp struct {
	mu      sync.Mutex
	conn    net.Conn
	decoder *json.Decoder
	// deleted holds the IDs of the devices that were removed from the machine.
	deleted map[string]bool
}

// message is any message of QEMU: a greeting, an answer, an error or an event.
type message struct {
	Return json.RawMessage
	Error  *struct{ Class, Desc string }
	Event  string
	Data   struct{ Device string }
}

// qmpTimeout is the deadline of one call. QEMU answers at once, unless the machine is busy.
const qmpTimeout = 30 * time.Second

func dialQMP(path string) (*qmp, error) {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return nil, err
	}
	q := &qmp{conn: conn, decoder: json.NewDecoder(conn), deleted: map[string]bool{}}
	if _, err = q.receive(qmpTimeout); err == nil { // the greeting
		err = q.call("qmp_capabilities", nil, nil)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return q, nil
}

func (q *qmp) receive(limit time.Duration) (m message, err error) {
	if err := q.conn.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return message{}, err
	}
	if err := q.decoder.Decode(&m); err != nil {
		return message{}, fmt.Errorf("QEMU's control socket: %w", err)
	}
	if m.Event == "DEVICE_DELETED" {
		q.deleted[m.Data.Device] = true
	}
	return m, nil
}

// call makes QEMU execute a command, and decodes the result into answer unless answer is nil.
func (q *qmp) call(command string, arguments, answer any) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}
	if err := json.NewEncoder(q.conn).Encode(request); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	for {
		m, err := q.receive(qmpTimeout)
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", command, err)
		case m.Error != nil:
			return fmt.Errorf("%s %v: %s", command, arguments, m.Error.Desc)
		case m.Return != nil && answer != nil:
			return json.Unmarshal(m.Return, answer)
		case m.Return != nil:
			return nil
		}
	}
}

// waitDeleted waits until a device was removed from the machine.
func (q *qmp) waitDeleted(id string, limit time.Duration) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for end := time.Now().Add(limit); !q.deleted[id]; {
		if _, err := q.receive(time.Until(end)); err != nil {
			return fmt.Errorf("wait until device %s has left the machine: %w", id, err)
		}
	}
	delete(q.deleted, id)
	return nil
}
