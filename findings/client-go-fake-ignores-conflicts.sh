#!/usr/bin/env bash
# client-go's fake clientset ignores field selectors, limits and stale resource versions.
#
# Version: k8s.io/client-go v0.37.2
# Guess:   the fake applies a field selector of metadata.name, which every resource of an API server has, or refuses it.
#          An update of an object that was changed since it was read is a conflict.
# Seen:    List with the selector metadata.name=a returns both nodes, as does List with a limit of 1, without a token to
#          continue. An update of a stale copy succeeds and undoes the other's change. No object has a resource version.
# Why:     label selectors do work, and NewClientset tracks managed fields, so the rest looks implemented. A test of two
#          writers, or of a watch for one node, passes there for code that fails on an API server.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require (
	k8s.io/api v0.37.2
	k8s.io/apimachinery v0.37.2
	k8s.io/client-go v0.37.2
)
END
cat >main.go <<'END'
package main

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func main() {
	node := func(name string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}}
	}
	ctx, nodes := context.Background(), fake.NewClientset(node("a"), node("b")).CoreV1().Nodes()
	for _, options := range []metav1.ListOptions{{LabelSelector: "name=a"}, {FieldSelector: "metadata.name=a"}, {Limit: 1}} {
		list, err := nodes.List(ctx, options)
		check(err)
		fmt.Printf("%d nodes, continue %q\n", len(list.Items), list.Continue)
	}
	mine, err := nodes.Get(ctx, "a", metav1.GetOptions{})
	check(err)
	stale := mine.DeepCopy()
	mine.Labels["mine"] = "yes"
	_, err = nodes.Update(ctx, mine, metav1.UpdateOptions{})
	check(err)
	_, err = nodes.Update(ctx, stale, metav1.UpdateOptions{})
	check(err)
	now, err := nodes.Get(ctx, "a", metav1.GetOptions{})
	check(err)
	fmt.Printf("labels %v, resource version %q\n", now.Labels, now.ResourceVersion)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
1 nodes, continue ""
2 nodes, continue ""
2 nodes, continue ""
labels map[name:a], resource version ""
END
echo "still so: selectors, limits and conflicts are ignored"
