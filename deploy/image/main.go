// Command image makes a container image of one static program, and of Debian's tools that it calls, without a daemon and
// without a registry:
//
//	image -o FILE -program PROGRAM -tag NAME:TAG [-user UID] [-label KEY=VALUE] [-certificates] [TOOL...]
//	image -root FOLDER -program PROGRAM [-certificates] [TOOL...]
//
// FILE is an archive that docker load, podman load, ctr images import and skopeo take; FOLDER gets the image's files alone, for a
// Dockerfile. Tools are taken from this machine, which must be a Debian, with the libraries they need, the copyright of their
// packages, and a record of these where scanners look for it; so are the certificates of those that one trusts, which come with
// tools. Nothing else is in the image, no shell and no package manager. What is the same on two machines makes the same image.
package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

func main() {
	opts := options{labels: map[string]string{}}
	flag.StringVar(&opts.output, "o", "image.tar", "archive to write")
	flag.StringVar(&opts.program, "program", "", "static program to run")
	flag.StringVar(&opts.tag, "tag", "", "name of the image, with its tag")
	flag.StringVar(&opts.user, "user", "", "user to run as, root where empty")
	flag.StringVar(&opts.root, "root", "", "folder to write the files to, instead of an archive")
	flag.BoolVar(&opts.certificates, "certificates", false, "with certificates of authorities, where there are no tools")
	flag.Func("label", "label of the image, KEY=VALUE", func(text string) error {
		key, value, found := strings.Cut(text, "=")
		if !found {
			return errors.New("KEY=VALUE is wanted")
		}
		opts.labels[key] = value
		return nil
	})
	flag.Parse()
	opts.tools = flag.Args()
	if err := opts.run(); err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
}

type options struct {
	output, root, program, tag, user string
	labels                           map[string]string
	certificates                     bool
	tools                            []string
}

func (o options) run() error {
	if o.program == "" || o.tag == "" && o.root == "" {
		return errors.New("-program is required, and -tag or -root")
	}
	program := newLayer()
	name := "/" + filepath.Base(o.program)
	if err := program.copy(o.program, name); err != nil {
		return err
	}
	layers := []*layer{program}
	if len(o.tools) > 0 || o.certificates {
		tools, err := system(o.tools)
		if err != nil {
			return err
		}
		layers = []*layer{tools, program} // what changes least comes first
	}
	if o.root != "" {
		for _, l := range layers {
			if err := l.write(o.root); err != nil {
				return err
			}
		}
		return nil
	}
	return writeFile(o.output, func(w io.Writer) error { return o.archive(w, layers, name) })
}

// archive writes the image in the form of docker save.
func (o options) archive(w io.Writer, layers []*layer, entrypoint string) error {
	type history struct {
		Created   time.Time `json:"created"`
		CreatedBy string    `json:"created_by"`
	}
	var config struct {
		Created      time.Time `json:"created"`
		Architecture string    `json:"architecture"`
		OS           string    `json:"os"`
		Config       struct {
			User       string            `json:",omitempty"`
			Env        []string          `json:",omitempty"`
			Entrypoint []string          `json:",omitempty"`
			Labels     map[string]string `json:",omitempty"`
		} `json:"config"`
		RootFS struct {
			Type    string   `json:"type"`
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
		History []history `json:"history"`
	}
	config.Created, config.Architecture, config.OS, config.RootFS.Type = epoch, runtime.GOARCH, "linux", "layers"
	config.Config.User = o.user
	config.Config.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	config.Config.Entrypoint = []string{entrypoint}
	config.Config.Labels = o.labels
	all := newLayer()
	var names []string
	for i, l := range layers {
		text, err := l.tar()
		if err != nil {
			return err
		}
		name := fmt.Sprintf("layer-%d.tar", i)
		all.add(name, 0o644, text)
		names = append(names, name)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, fmt.Sprintf("sha256:%x", sha256.Sum256(text)))
		config.History = append(config.History, history{epoch, "image"})
	}
	manifest := []map[string]any{{"Config": "config.json", "RepoTags": []string{o.tag}, "Layers": names}}
	for name, content := range map[string]any{"config.json": config, "manifest.json": manifest} {
		text, err := json.Marshal(content)
		if err != nil {
			return err
		}
		all.add(name, 0o644, text)
	}
	text, err := all.tar()
	if err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}

// system is a root filesystem with tools of this machine, or with certificates alone.
func system(tools []string) (*layer, error) {
	l := newLayer()
	// As in Debian, where programs and libraries are all below /usr.
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		l.link("usr/"+dir, dir)
	}
	l.link("/proc/self/mounts", "etc/mtab")
	l.add("etc/passwd", 0o644, []byte("root:x:0:0:root:/:/usr/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/usr/sbin/nologin\n"))
	l.add("etc/group", 0o644, []byte("root:x:0:\nnonroot:x:65532:\n"))
	var files []string
	for _, tool := range tools {
		found, err := exec.LookPath(tool)
		if err != nil {
			return nil, fmt.Errorf("%w: install its package, see make deps", err)
		}
		libraries, err := libraries(found)
		if err != nil {
			return nil, err
		}
		files = append(append(files, found), libraries...)
		if strings.HasPrefix(tool, "mkfs.ext") {
			files = append(files, "/etc/mke2fs.conf") // what it makes of a disk by default
		}
	}
	slices.Sort(files)
	for _, file := range slices.Compact(files) {
		if err := l.copy(file, merged(file)); err != nil {
			return nil, err
		}
		owner, err := packageOf(file)
		if err != nil {
			return nil, err
		}
		if err := l.record(owner); err != nil {
			return nil, err
		}
	}
	// Whom the controller trusts to be a rack. The file is made when the package is installed, and so is from none.
	if err := l.record("ca-certificates"); err != nil {
		return nil, err
	}
	return l, l.copy(certificates, certificates)
}

const certificates = "/etc/ssl/certs/ca-certificates.crt"

// merged is where a file of the root folder really is.
func merged(file string) string {
	for _, dir := range []string{"/bin/", "/sbin/", "/lib/", "/lib64/"} {
		if strings.HasPrefix(file, dir) {
			return "/usr" + file
		}
	}
	return file
}

// libraries are the paths of what the dynamic linker loads for a program, itself included.
func libraries(program string) ([]string, error) {
	out, err := exec.Command("ldd", program).Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", program, err)
	}
	var paths []string
	for line := range strings.Lines(string(out)) {
		for field := range strings.FieldsSeq(line) {
			if strings.HasPrefix(field, "/") {
				paths = append(paths, field)
			}
		}
	}
	return paths, nil
}

// packageOf is the Debian package that a file is from. A package may name it below / or below /usr.
func packageOf(file string) (string, error) {
	file = merged(file)
	for _, name := range []string{file, strings.TrimPrefix(file, "/usr")} {
		out, err := exec.Command("dpkg-query", "--search", name).Output()
		if err == nil {
			owner, _, _ := strings.Cut(string(out), ":")
			return owner, nil
		}
	}
	return "", fmt.Errorf("%s is from no Debian package", file)
}

// record notes that files of a Debian package are in the image, and on what terms.
func (l *layer) record(name string) error {
	status, err := exec.Command("dpkg-query", "--status", name).Output()
	if err != nil {
		return fmt.Errorf("dpkg-query --status %s: %w", name, err)
	}
	l.add("var/lib/dpkg/status.d/"+name, 0o644, status)
	copyright := "/usr/share/doc/" + name + "/copyright"
	return l.copy(copyright, copyright)
}

// epoch is when everything was last changed, so that images can be compared.
var epoch = time.Unix(0, 0).UTC()

// layer is a set of files by path.
type layer struct{ entries map[string]entry }

type entry struct {
	mode    int64
	content []byte
	link    string
}

func newLayer() *layer { return &layer{entries: map[string]entry{}} }

func (l *layer) add(name string, mode int64, content []byte) {
	l.entries[strings.TrimPrefix(name, "/")] = entry{mode: mode, content: content}
}

func (l *layer) link(to, name string) { l.entries[name] = entry{mode: 0o777, link: to} }

// copy adds a file of this machine, following links.
func (l *layer) copy(from, name string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	mode := int64(0o644)
	if info.Mode()&0o111 != 0 {
		mode = 0o755
	}
	l.add(name, mode, content)
	return nil
}

// write writes the files below a folder.
func (l *layer) write(root string) error {
	for name, e := range l.entries {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		err := os.Remove(file)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if e.link != "" {
			err = os.Symlink(e.link, file)
		} else {
			err = os.WriteFile(file, e.content, fs.FileMode(e.mode))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// tar is the layer as an archive, folders before what is in them.
func (l *layer) tar() ([]byte, error) {
	var names []string
	for name := range l.entries {
		names = append(names, name)
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			names = append(names, dir+"/")
		}
	}
	slices.Sort(names)
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	for _, name := range slices.Compact(names) {
		header := &tar.Header{Name: name, ModTime: epoch, Format: tar.FormatUSTAR}
		e := l.entries[name]
		switch {
		case strings.HasSuffix(name, "/"):
			header.Typeflag, header.Mode = tar.TypeDir, 0o755
		case e.link != "":
			header.Typeflag, header.Mode, header.Linkname = tar.TypeSymlink, e.mode, e.link
		default:
			header.Typeflag, header.Mode, header.Size = tar.TypeReg, e.mode, int64(len(e.content))
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return text.Bytes(), nil
}

// writeFile writes a file whole or not at all.
func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".image.*")
	if err != nil {
		return err
	}
	if err := errors.Join(write(f), f.Chmod(0o644), f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return os.Rename(f.Name(), name)
}
