// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/google/uuid"
)

// What the rack tells about the network of an instance. Oxide's cloud controller manager asks for it, the plugin does
// not (docs/reference/rack.md §8).

const interfaceName = "net0"

// The addresses of a project's default subnet, 172.30.0.0/22. A rack keeps the first five addresses and the last one
// for itself.
var firstAddress = netip.AddrFrom4([4]byte{172, 30, 0, 5})

const addresses = 1<<10 - 6

// networkInterface is the one network interface that each instance has.
type networkInterface struct{ *instance }

func (n networkInterface) key() (name, id string) {
	return interfaceName, derivedID(n.ID, interfaceName)
}

// derivedID is the ID of an object that belongs to another one and has no record.
func derivedID(owner, what string) string {
	return uuid.NewSHA1(uuid.NameSpaceOID, []byte(owner+"/"+what)).String()
}

// ip is the interface's address in the subnet. Addresses repeat on a rack that has made more instances than the subnet
// has addresses.
func (n networkInterface) ip() netip.Addr {
	first := firstAddress.As4()
	var ip [4]byte
	binary.BigEndian.PutUint32(ip[:], binary.BigEndian.Uint32(first[:])+uint32(n.Number%addresses))
	return netip.AddrFrom4(ip)
}

type networkInterfaceView struct {
	ID           string      `json:"id"`
	Name         string      `json:"name"`
	Description  string      `json:"description"`
	InstanceID   string      `json:"instance_id"`
	IPStack      ipStackView `json:"ip_stack"`
	MAC          string      `json:"mac"`
	Primary      bool        `json:"primary"`
	SubnetID     string      `json:"subnet_id"`
	VPCID        string      `json:"vpc_id"`
	TimeCreated  time.Time   `json:"time_created"`
	TimeModified time.Time   `json:"time_modified"`
}

// ipStackView is the addresses of an interface. Here each has IPv4 only.
type ipStackView struct {
	Type  string        `json:"type"`
	Value ipv4StackView `json:"value"`
}

type ipv4StackView struct {
	IP         string   `json:"ip"`
	TransitIPs []string `json:"transit_ips"`
}

func (n networkInterface) view() networkInterfaceView {
	name, id := n.key()
	return networkInterfaceView{
		ID: id, Name: name, Description: "primary interface of " + n.Name, InstanceID: n.ID,
		IPStack: ipStackView{Type: "v4", Value: ipv4StackView{IP: n.ip().String(), TransitIPs: []string{}}},
		// A8:40:25 is Oxide's.
		MAC:     fmt.Sprintf("A8:40:25:F0:%02X:%02X", byte(n.Number>>8), byte(n.Number)),
		Primary: true, SubnetID: derivedID(n.ProjectID, "subnet"), VPCID: derivedID(n.ProjectID, "vpc"),
		TimeCreated: n.Created, TimeModified: n.Created,
	}
}

// parseNetworkInterfaceList reads a request for the interfaces of an instance. Unlike the other lists of an instance,
// the query names the instance, and so does a page token.
func parseNetworkInterfaceList(r *Rack, q *request) (action, error) {
	sc, err := q.parseScan(sortsByNameOrID, false)
	if err != nil {
		return nil, err
	}
	switch {
	case sc.last == "":
		if sc.instance, err = q.instance(); err != nil {
			return nil, err
		}
	case sc.instance == nil:
		return nil, badQuery("failed to parse pagination token: corrupted token") // a token of another list
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		i, err := r.lookupInstance(who, target{sel: *sc.instance, project: sc.project}, accessRead)
		if err != nil {
			return answer{}, err
		}
		var interfaces collection[networkInterface]
		interfaces.put(networkInterface{i})
		return answer{200, makePage(interfaces.next(sc), sc, networkInterface.view)}, nil
	}, nil
}

// instance returns the instance parameter, which is required.
func (q *request) instance() (*selector, error) {
	s, has, err := q.param("instance")
	if err != nil {
		return nil, err
	}
	if !has {
		return nil, badQuery("missing field `instance`")
	}
	sel, err := parseSelector(s)
	if err != nil {
		return nil, badQuery("%v", err)
	}
	return &sel, nil
}

// parseExternalIPList reads a request for the external addresses of an instance. Here no instance has any. The list has
// no pages.
func parseExternalIPList(r *Rack, q *request) (action, error) {
	return parseView(r, q, r.lookupInstance, func(*instance) page[struct{}] { return page[struct{}]{Items: []struct{}{}} })
}
