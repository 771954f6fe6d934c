# Completion of rlinf: passes it the line up to the cursor. If it prints nothing, the shell completes file names itself.
_rlinf() {
  local -a found=("${(@f)$("${words[1]}" --complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
  [[ -z "$found" ]] && { compset -P '*='; _files; return }
  compadd -S '' -- ${(M)found:#*[=.]}
  compadd -- ${found:#*[=.]}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _rlinf rlinf
