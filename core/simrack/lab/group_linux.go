package lab

import "syscall"

// apart puts a program into a process group of its own: a Ctrl-C at the terminal reaches only the program that started
// it, which ends it when nothing needs it any more. When that program is killed instead, the kernel tells this one to
// end. (The kernel does so when the starting thread ends; Go ends threads only at the wish of who locks them.)
func apart() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
